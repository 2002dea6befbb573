"""OpenAI request bodies: what is honoured, what is refused by name; anything else is ignored."""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from collm_common.errors import InvalidRequest
from collm_common.types import SamplingParams

StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Limit = Annotated[int, Meta(ge=1, le=1_000_000)]
Milliseconds = Annotated[float, Meta(gt=0, le=3_600_000)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
SEEDS = 2**63

NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "use_beam_search": (False,),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (0,),
    "prompt_embeds": (),
    "audio": (),
    "modalities": (["text"],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (True, False),
    "return_token_ids": (False,),
}
"""Fields that change the answer and are not served, with the values besides null that leave it as it is."""


class StreamOptions(Struct):
    """When a streamed answer tells usage: at its end, in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SloLimits(Struct, forbid_unknown_fields=True):
    """An objective of the request's own."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None


class Part(Struct):
    """A piece of a message's content; only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(Struct):
    """A turn; several text parts are one text."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[Part] | None = None

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Body(Struct, kw_only=True):
    """Fields of both kinds of completion; null is the same as absent."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    seed: int | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    ignore_eos: bool | None = None
    reference: str | None = None
    slo: str | SloLimits | None = None

    @property
    def limit(self) -> int | None:
        """The most output tokens, if the client says so."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """With OpenAI's defaults. A request without a seed gets one, so that another replica can go on the same way."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            seed=secrets.randbelow(SEEDS) if self.seed is None else self.seed % SEEDS,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            logprobs=logprobs,
            ignore_eos=bool(self.ignore_eos),
        )


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    @property
    def logprob_count(self) -> int | None:
        """How many alternatives a token tells; None: no log-probabilities at all. Raises InvalidRequest."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def conversation(self) -> list[dict[str, str]]:
        """As chat templates take it."""
        return [{"role": message.role, "content": message.text} for message in self.messages]


class CompletionBody(Body, kw_only=True):
    """POST /v1/completions, one prompt: text or tokens."""

    prompt: str | list[str | int | list[int]]
    logprobs: Alternatives | None = None

    @property
    def logprob_count(self) -> int | None:
        """As asked for."""
        return self.logprobs

    def single_prompt(self) -> str | list[int]:
        """Raises InvalidRequest for none, several, or a mixture."""
        items = self.prompt
        if isinstance(items, str):
            return items
        tokens = [item for item in items if isinstance(item, int)]
        if items and len(tokens) == len(items):
            return tokens
        if len(items) != 1 or isinstance(items[0], int):
            raise InvalidRequest(f"prompt: {len(items)} prompts; a request takes one", param="prompt")
        return items[0]


B = TypeVar("B", bound=Body)


def parse(kind: type[B], data: bytes) -> B:
    """Raises InvalidRequest that names the field."""
    try:
        raw: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", param="body", code="invalid_json") from error
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object", param="body", code="invalid_json")
    for name in raw.keys() & NEUTRAL.keys():
        if raw[name] is not None and raw[name] not in NEUTRAL[name]:
            raise InvalidRequest(f"{name} is not supported", param=name, code="unsupported_parameter")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        field = _field(str(error))
        raise InvalidRequest(f"{field}: {error}", param=field) from error


def _field(message: str) -> str:
    """The field that msgspec's message is about: its path, and the name of a missing one."""
    path = re.search(r"at `\$\.?([^`]*)`$", message)
    missing = re.search(r"missing required field `(\w+)`", message)
    return ".".join(found.group(1) for found in (path, missing) if found and found.group(1)) or "body"
