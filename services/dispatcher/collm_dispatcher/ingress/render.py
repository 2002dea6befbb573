"""Answers as OpenAI shapes them: bodies, chunks, usage, log-probabilities, errors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from collm_common.errors import RequestError
from collm_common.messages import Delta, Done, TokenLogprob
from collm_dispatcher.ingress.tokenizing import Prompt, Tokenizing


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
        self.prompt_logprobs: list[TokenLogprob] = []

    def take(self, delta: Delta) -> None:
        """One more piece."""
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish = delta.finish or self.finish


class Shape:
    """Chat and text completions differ in names only.

    `echoes` are what stands before the text of each choice, if anything; `with_logprobs`: whether they were asked for.
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
        echoes: Sequence[Prompt | None],
    ) -> None:
        self._chat, self._with_logprobs, self._text, self._echoes = chat, with_logprobs, text, echoes
        self._base = {"id": f"{'chatcmpl' if chat else 'cmpl'}-{id_}", "created": created, "model": model}

    def first(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """The chunk that opens an answer with its first `delta`, if it has one: a role or an echo."""
        echo, opening, logprobs = self._echoes[index], dict[str, Any](), None
        if self._chat:
            opening = {"delta": {"role": "assistant", "content": ""}}
        elif echo is None:
            return None
        else:
            opening, logprobs = {"text": echo.text}, self._echoed(echo, delta.prompt_logprobs)
        return self._chunk([{"index": index, **opening, "logprobs": logprobs, "finish_reason": None}])

    def delta(self, index: int, delta: Delta, offset: int) -> dict[str, Any]:
        """New text; `offset` counts the characters before it, the echo left out."""
        content = {"delta": {"content": delta.text}} if self._chat else {"text": delta.text}
        logprobs = self._logprobs(delta.logprobs, len(self._echo(index)) + offset)
        return self._chunk([{"index": index, **content, "logprobs": logprobs, "finish_reason": None}])

    def width(self, delta: Delta) -> int:
        """By how many characters it moves the offset of what follows: where tokens are told, by theirs."""
        if not delta.logprobs:
            return len(delta.text)
        return sum(len(self._text.token_text(one.token)) for one in delta.logprobs)

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
        before, echo = self._echo(index), self._echoes[index]
        content = {"message": message} if self._chat else {"text": before + choice.text}
        logprobs = self._logprobs(choice.logprobs, len(before))
        if echo is not None and logprobs is not None:
            first = self._echoed(echo, choice.prompt_logprobs) or {}
            logprobs = {name: first[name] + values for name, values in logprobs.items()}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": choice.finish}

    def _echo(self, index: int) -> str:
        echo = self._echoes[index]
        return "" if echo is None else echo.text

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
        return self._text_logprobs(logprobs, offset)

    def _echoed(self, echo: Prompt, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Of the prompt: nothing comes before its first token, so that one has none."""
        return self._text_logprobs(told, 0, echo.tokens[:1]) if self._with_logprobs else None

    def _text_logprobs(
        self, told: Sequence[TokenLogprob], offset: int, untold: Sequence[int] = ()
    ) -> dict[str, list[Any]]:
        tokens = [self._text.token_text(token) for token in (*untold, *(one.token for one in told))]
        nothing = [None] * len(untold)
        return {
            "tokens": tokens,
            "token_logprobs": [*nothing, *(one.logprob for one in told)],
            "top_logprobs": [*nothing, *({self._text.token_text(t): p for t, p in one.top} for one in told)],
            "text_offset": list(accumulate(map(len, tokens), initial=offset))[:-1],
        }

    def _chat_logprob(self, logprob: TokenLogprob) -> dict[str, Any]:
        top = [self._entry(token, value) for token, value in logprob.top]
        return {**self._entry(logprob.token, logprob.logprob), "top_logprobs": top}

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        text = self._text.token_text(token)
        return {"token": text, "logprob": value, "bytes": list(text.encode())}
