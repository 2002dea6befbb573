"""Replies: replica, or whoever gives a request up -> ingress."""

from __future__ import annotations

from msgspec import Struct

from collm_common.messages.base import Message, RequestId, Tokens
from collm_common.types import AdapterRef, Count, Quality


class TokenLogprob(Struct, frozen=True):
    """Log-probability of the chosen token and of the most likely ones (token, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(Struct, frozen=True, tag="delta", tag_field="kind"):
    """New tokens of one request. `offset` counts the output tokens before these, prefix included.

    `finish` is None, or why it ended: stop, length, cancelled. The first one has the log-probabilities of the prompt's
    tokens from the second on, if they were asked for.
    """

    id: RequestId
    attempt: Count
    offset: Count
    tokens: Tokens
    text: str
    adapter: AdapterRef | None = None
    finish: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


class Expected(Struct, frozen=True):
    """What the dispatch loop expected of a request: seconds from release to the first token, seconds a token after it.

    `scale` is the factor by which it had corrected the fitted latencies.
    """

    first_s: float
    token_s: float
    scale: float = 1.0


class Done(Struct, frozen=True, tag="done", tag_field="kind"):
    """The request is complete and its entry gone. Times are seconds at the `replica` that served it.

    `cached_tokens` of its prompt were not computed: an earlier request began with the same ones.
    """

    id: RequestId
    attempt: Count
    output_tokens: Count
    queue_s: float
    prefill_s: float
    decode_s: float
    quality: Quality | None = None
    expected: Expected | None = None
    replica: str = ""
    cached_tokens: Count = 0

    @property
    def first_s(self) -> float:
        """Seconds from its arrival at the replica to its first token."""
        return self.queue_s + self.prefill_s

    @property
    def token_s(self) -> float | None:
        """Seconds a token after the first; None if there is only one."""
        return self.decode_s / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Failed(Struct, frozen=True, tag="failed", tag_field="kind"):
    """The request cannot be served: an HTTP status with the reason, and the field it is about if there is one."""

    id: RequestId
    attempt: Count
    status: int
    code: str
    message: str
    param: str = ""


class Lost(Struct, frozen=True, tag="lost", tag_field="kind"):
    """The replica that had the request is gone: its ingress appends it again with what the client has seen."""

    id: RequestId
    attempt: Count


Reply = Delta | Done | Failed | Lost


class Replies(Message, frozen=True, kw_only=True, tag="replies"):
    """Everything one engine step says to one ingress."""

    items: tuple[Reply, ...]
