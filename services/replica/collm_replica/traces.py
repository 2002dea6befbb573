"""What a replica's spans say of a request: how long it waited here, its prefill, its decoding."""

from __future__ import annotations

from collm_common.clock import Clock
from collm_common.messages import Done, Failed, Reply, Request
from collm_common.tracing import UNTRACED, Span, Tracer, Value


class Traces:
    """A consumer's span for each request that is here, and below it one for each stage that it went through."""

    def __init__(self, tracer: Tracer, subflow: str, clock: Clock) -> None:
        self._tracer, self._clock = tracer, clock
        self._about: dict[str, Value] = {
            "messaging.system": "redis",
            "messaging.operation.type": "process",
            "messaging.destination.name": subflow,
        }

    def begin(self, request: Request) -> Trace | None:
        """It came in; None where nothing is traced."""
        if self._tracer is UNTRACED:
            return None
        now, about = self._clock.now(), {**self._about, "messaging.message.id": request.id}
        about |= {"gen_ai.request.model": request.adapter or request.model, "collm.attempt": request.attempt}
        return Trace(self._tracer, self._tracer.begin("process request", "consumer", request.traceparent, about), now)


class Trace:
    """Of one request that came in at `started_s`."""

    def __init__(self, tracer: Tracer, span: Span, started_s: float) -> None:
        self._tracer, self._span, self._started_s = tracer, span, started_s

    def end(self, reply: Reply) -> None:
        """With its final reply: its stages, by the engine's own clock, or why there is no answer."""
        if isinstance(reply, Done):
            self._done(reply)
        elif isinstance(reply, Failed):
            self.failed(reply.code)

    def failed(self, why: str) -> None:
        """It ends without an answer."""
        self._span.end(error=why)

    def _done(self, done: Done) -> None:
        at_s = self._started_s
        for name, seconds in (("queue", done.queue_s), ("prefill", done.prefill_s), ("decode", done.decode_s)):
            stage = self._tracer.begin(name, "internal", self._span.parent, at_s=at_s)
            at_s += seconds
            stage.end(at_s=at_s)
        told: dict[str, Value] = {
            "gen_ai.usage.output_tokens": done.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": done.cached_tokens,
        }
        self._span.end(told)
