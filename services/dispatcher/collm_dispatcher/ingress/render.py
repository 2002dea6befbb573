"""Answers as OpenAI shapes them: bodies, chunks, usage, log-probabilities, errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collm_common.errors import RequestError
from collm_common.messages import Delta, Done, TokenLogprob
from collm_dispatcher.ingress.tokenizing import Tokenizing


def error_body(error: RequestError) -> dict[str, Any]:
    """The `error` object."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param or None, "code": error.code}}


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """Token counts."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def cached(tokens: int) -> dict[str, dict[str, int]]:
    """What usage says of prompt tokens that were not computed again."""
    return {"prompt_tokens_details": {"cached_tokens": tokens}}


def extension(done: Done, adapter: str | None, queue_s: float) -> dict[str, Any]:
    """The `collm` object: which version answered, where the time went, how the reference scored."""
    quality = done.quality
    return {
        "adapter": adapter,
        "queue_ms": round(1000 * queue_s, 3),
        "prefill_ms": round(1000 * done.prefill_s, 3),
        "decode_ms": round(1000 * done.decode_s, 3),
        "cross_entropy": None if quality is None else quality.cross_entropy,
        "reference_tokens": None if quality is None else quality.tokens,
    }


class Choice:
    """An answer that is told as a whole, piece by piece."""

    def __init__(self) -> None:
        self.text, self.finish = "", "stop"
        self.logprobs: list[TokenLogprob] = []

    def take(self, delta: Delta) -> None:
        """One more piece."""
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.finish = delta.finish or self.finish


class Shape:
    """Chat and text completions differ in names only.

    `echoes` are what stands before the text of each choice; `with_logprobs` says whether they were asked for.
    """

    def __init__(
        self,
        *,
        chat: bool,
        id_: str,
        created: int,
        model: str,
        with_logprobs: bool,
        text: Tokenizing,
        echoes: Sequence[str],
    ) -> None:
        self._chat, self._with_logprobs, self._text, self._echoes = chat, with_logprobs, text, echoes
        self._base = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{id_}", "created": created, "model": model}

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that opens an answer, if it has one: a role or an echo."""
        if not self._chat and not self._echoes[index]:
            return None
        opening = {"delta": {"role": "assistant", "content": ""}} if self._chat else {"text": self._echoes[index]}
        return self._chunk([{"index": index, **opening, "logprobs": None, "finish_reason": None}])

    def delta(self, index: int, delta: Delta, offset: int) -> dict[str, Any]:
        """New text; `offset` counts the characters before it, the echo left out."""
        content = {"delta": {"content": delta.text}} if self._chat else {"text": delta.text}
        logprobs = self._logprobs(delta.logprobs, offset)
        return self._chunk([{"index": index, **content, "logprobs": logprobs, "finish_reason": None}])

    def finish(self, index: int, reason: str) -> dict[str, Any]:
        """The chunk that ends the text."""
        content: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        return self._chunk([{"index": index, **content, "logprobs": None, "finish_reason": reason}])

    def last(self, counts: dict[str, Any] | None, collm: dict[str, Any]) -> dict[str, Any]:
        """After the text: usage if it was asked for, and what CoLLM adds."""
        return self._chunk([]) | ({"usage": counts} if counts is not None else {}) | {"collm": collm}

    def whole(self, choices: Sequence[Choice], counts: dict[str, Any], collm: dict[str, Any]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        kind = "chat.completion" if self._chat else "text_completion"
        told = [self._told(index, choice) for index, choice in enumerate(choices)]
        return {**self._base, "object": kind, "choices": told, "usage": counts, "collm": collm}

    def _told(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        content = {"message": message} if self._chat else {"text": self._echoes[index] + choice.text}
        logprobs = self._logprobs(choice.logprobs, 0)
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": choice.finish}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._base,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "choices": choices,
        }

    def _logprobs(self, logprobs: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        if self._chat:
            return {"content": [self._chat_logprob(logprob) for logprob in logprobs]}
        tokens, offsets = [self._text.token_text(logprob.token) for logprob in logprobs], []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [logprob.logprob for logprob in logprobs],
            "top_logprobs": [{self._text.token_text(t): value for t, value in logprob.top} for logprob in logprobs],
            "text_offset": offsets,
        }

    def _chat_logprob(self, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._entry(token, value) for token, value in logprob.top]
        return {**self._entry(logprob.token, logprob.logprob), "top_logprobs": top}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self._text.token_text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}
