"""An accepted HTTP request: one answer a choice, and what was measured of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from collm_common.messages import Delta, Done
from collm_dispatcher.ingress import render
from collm_dispatcher.ingress.metrics import Metrics
from collm_dispatcher.ingress.open_requests import Open
from collm_dispatcher.ingress.render import Choice, Shape


class Answer:
    """One choice: its request and what was measured of it."""

    def __init__(self, open_: Open, metrics: Metrics, arrived_s: float) -> None:
        self.open, self._metrics, self._arrived_s = open_, metrics, arrived_s
        self.ttft_s: float | None = None
        self.e2e_s = self._last_s = 0.0
        self.done: Done | None = None
        request = open_.request
        metrics.accepted(request.model, request.slo, len(request.prompt), request.sampling.max_tokens)

    @property
    def adapter(self) -> str | None:
        """The version that answers, `name@v3`."""
        return str(self.open.adapter) if self.open.adapter is not None else None

    @property
    def queue_s(self) -> float:
        """From arrival to the start of prefill."""
        return max(0.0, (self.ttft_s or 0.0) - (self.done.prefill_s if self.done else 0.0))

    def extension(self) -> dict[str, Any]:
        """The `collm` object, once it is done."""
        assert self.done is not None
        return render.extension(self.done, self.adapter, self.queue_s)

    def saw(self, delta: Delta, now_s: float) -> None:
        """Measure one delta; `now_s` is monotonic."""
        since_s, model = now_s - self._arrived_s, self.open.request.model
        if self.ttft_s is None:
            self.ttft_s = since_s
            self._metrics.ttft.labels(model).observe(since_s)
            self._metrics.waiting.labels(model).dec()
            self._metrics.running.labels(model).inc()
        elif delta.tokens:
            self._metrics.itl.labels(model).observe((since_s - self._last_s) / len(delta.tokens))
        self._last_s = since_s
        if delta.finish is not None:
            self.e2e_s = since_s

    def close(self) -> None:
        """Account for how it ended."""
        request = self.open.request
        (self._metrics.waiting if self.ttft_s is None else self._metrics.running).labels(request.model).dec()
        if self.open.finish is None or self.ttft_s is None:
            self._metrics.missed(request.model, request.slo)
            return
        if self.done is not None:
            self._metrics.compared(request.model, self.done)
            self._metrics.timed(request.model, self.queue_s, self.done)
            self._metrics.reused(request.model, len(request.prompt), self.done)
        tokens = len(self.open.tokens)
        self._metrics.finished(request.model, request.slo, self.ttft_s, self.e2e_s, tokens, self.open.finish)


class Response:
    """`answers` by choice: all of the first prompt, then all of the second. `prompt_tokens` counts each prompt once.

    With `echo_only` nothing is told of the one token that every request makes.
    """

    def __init__(self, shape: Shape, answers: Sequence[Answer], prompt_tokens: int, echo_only: bool = False) -> None:
        self.echo_only = echo_only
        self.shape, self.answers, self._prompt_tokens = shape, answers, prompt_tokens
        self._choices = [Choice() for _ in answers]

    @property
    def id(self) -> str:
        """Of the first choice's request."""
        return self.answers[0].open.request.id

    def take(self, index: int, delta: Delta) -> None:
        """Remember a piece of an answer."""
        self._choices[index].take(delta)

    @property
    def text(self) -> str:
        """Of the first choice, so far."""
        return self._choices[0].text

    @property
    def _made(self) -> int:
        return sum(len(answer.open.tokens) for answer in self.answers)

    def usage(self) -> dict[str, Any]:
        """Tokens so far; how many of the prompts were known already, once all is done."""
        counts = render.usage(self._prompt_tokens, 0 if self.echo_only else self._made)
        done = [(answer.open.request.prompt, answer.done.cached_tokens) for answer in self.answers if answer.done]
        if len(done) < len(self.answers):
            return counts
        return counts | render.cached(sum(dict(reversed(done)).values()))

    def extension(self) -> dict[str, Any]:
        """The `collm` object once all is done: of the choice that ended last, for which the client had to wait."""
        return max(self.answers, key=lambda answer: answer.e2e_s).extension()

    def whole(self) -> dict[str, Any]:
        """The body, once all is done."""
        return self.shape.whole(self._choices, self.usage(), self.extension())
