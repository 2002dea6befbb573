"""OpenAI request bodies: what is honoured; what is neither that nor refused by name is ignored."""

from __future__ import annotations

import re
import secrets
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from collm_common.errors import InvalidRequest
from collm_common.types import Bias, Fraction, Penalty, SamplingParams
from collm_dispatcher.ingress.unsupported import NEITHER, NOT_IN_CHATS, Neutral, refuse

StopText = Annotated[str, Meta(min_length=1, max_length=256)]
Limit = Annotated[int, Meta(ge=1, le=1_000_000)]
Milliseconds = Annotated[float, Meta(gt=0, le=3_600_000)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
SEEDS = 2**63
MAX_CHOICES = 128
MAX_SCHEMA = 65_536


class StreamOptions(Struct):
    """When a streamed answer tells usage: at its end, in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SloLimits(Struct, forbid_unknown_fields=True):
    """An objective of the request's own."""

    ttft_ms: Milliseconds | None = None
    tpot_ms: Milliseconds | None = None
    e2e_ms: Milliseconds | None = None


class NamedSchema(Struct):
    """A JSON schema; `strict` needs no saying, for every answer follows its schema."""

    schema: dict[str, Any]
    name: Annotated[str, Meta(max_length=64)] = ""
    strict: bool | None = None


class ResponseFormat(Struct):
    """What an answer looks like: free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @property
    def schema(self) -> str:
        """As the replica takes it, "" for free text. Raises InvalidRequest."""
        if self.type == "text":
            return ""
        if self.type == "json_object":
            return '{"type":"object"}'
        if self.json_schema is None:
            raise InvalidRequest("response_format.json_schema: is missing", param="response_format.json_schema")
        text = msgspec.json.encode(self.json_schema.schema).decode()
        if len(text) > MAX_SCHEMA:
            raise InvalidRequest(
                f"response_format: the schema has {len(text)} characters, the limit is {MAX_SCHEMA}",
                param="response_format.json_schema.schema",
            )
        return text


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

    neutral: ClassVar[Neutral] = NEITHER
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=10)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    seed: int | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Token], Meta(max_length=128)] | None = None
    ignore_eos: bool | None = None
    response_format: ResponseFormat | None = None
    reference: str | None = None
    store: bool | None = None
    slo: str | SloLimits | None = None

    @property
    def echoes(self) -> bool:
        """Whether the prompt stands before the answer."""
        return False

    @property
    def limit(self) -> int | None:
        """The most output tokens, if the client says so."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def sampling(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """With OpenAI's defaults. A request without a seed gets one, so that another replica can go on the same way.

        Raises InvalidRequest for fields that contradict one another.
        """
        min_tokens = self.min_tokens or 0
        if min_tokens > max_tokens:
            raise InvalidRequest(f"min_tokens {min_tokens} is over the limit of {max_tokens}", param="min_tokens")
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self._biases(),
            seed=secrets.randbelow(SEEDS) if self.seed is None else self.seed % SEEDS,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            logprobs=logprobs,
            ignore_eos=bool(self.ignore_eos),
            min_tokens=min_tokens,
            stop_tokens=tuple(self.stop_token_ids or ()),
            json_schema=self._schema(),
            prompt_logprobs=self.echoes and logprobs is not None,
        )

    def _schema(self) -> str:
        schema = self.response_format.schema if self.response_format is not None else ""
        for name in ("ignore_eos", "min_tokens"):
            if schema and getattr(self, name):
                raise InvalidRequest(f"{name} cannot be combined with a response_format that ends", param=name)
        return schema

    def _biases(self) -> tuple[tuple[int, float], ...]:
        biases = self.logit_bias or {}
        wrong = next((token for token in biases if not re.fullmatch(r"[0-9]{1,9}", token)), None)
        if wrong is not None:
            raise InvalidRequest(f"logit_bias: {wrong[:64]!r} is no token id", param="logit_bias")
        return tuple({int(token): value for token, value in biases.items()}.items())


class ChatBody(Body, kw_only=True):
    """POST /v1/chat/completions."""

    neutral: ClassVar[Neutral] = NOT_IN_CHATS
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=4096)]
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None

    @property
    def logprob_count(self) -> int | None:
        """How many alternatives a token tells; None: no log-probabilities at all. Raises InvalidRequest."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def size(self) -> int:
        """Characters, about."""
        return sum(len(message.text) for message in self.messages)

    def conversation(self) -> list[dict[str, str]]:
        """As chat templates take it."""
        return [{"role": message.role, "content": message.text} for message in self.messages]


class CompletionBody(Body, kw_only=True):
    """POST /v1/completions: one or several prompts, each text or tokens. `max_tokens` 0 asks for an echo alone."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(max_length=1_000_000)]
    max_tokens: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    echo: bool | None = None
    logprobs: Alternatives | None = None

    @property
    def limit(self) -> int | None:
        """The most output tokens, if the client says so. Raises InvalidRequest."""
        if super().limit == 0 and not self.echo:
            raise InvalidRequest("max_tokens: must be at least 1, unless echo is true", param="max_tokens")
        return super().limit

    @property
    def echoes(self) -> bool:
        """Whether the prompt stands before the answer."""
        return bool(self.echo)

    @property
    def logprob_count(self) -> int | None:
        """As asked for."""
        return self.logprobs

    @property
    def size(self) -> int:
        """Characters or tokens, about."""
        return sum(len(prompt) for prompt in self.prompts())

    def prompts(self) -> list[str | list[int]]:
        """One or several. Raises InvalidRequest for none, an empty one, or a mixture of tokens and texts."""
        items = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        tokens = [item for item in items if isinstance(item, int)]
        if items and len(tokens) == len(items):
            return [tokens]
        if tokens or not items or not all(items):
            raise InvalidRequest("prompt: must be text, tokens, or a list of either; none may be empty", param="prompt")
        return [item for item in items if not isinstance(item, int)]


B = TypeVar("B", bound=Struct)


def parse(kind: type[B], data: bytes) -> B:
    """Raises InvalidRequest that names the field."""
    try:
        raw: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", param="body", code="invalid_json") from error
    if not isinstance(raw, dict):
        raise InvalidRequest("the body must be a JSON object", param="body", code="invalid_json")
    if issubclass(kind, Body):
        refuse(raw, kind.neutral)
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
