"""From fitted latencies to modes: what each replica can do for each stream, and who is the fastest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec
from msgspec import Struct

from collm_common.latency import LatencyModel
from collm_common.messages import Expected
from collm_common.types import Slo
from collm_dispatcher.policy.pacing import Mode, Shape, StepTime, first_s, serving_mode, token_s
from collm_dispatcher.policy.streams import Stream


class Fit(Struct, frozen=True):
    """A replica's latencies beside `train_batch` (B), which `scale` corrects by what was measured lately.

    At most `most` requests are in flight: the coordinator's cap, or the engine's. `model` None: nothing is known.
    """

    model: LatencyModel | None
    most: int
    train_batch: int = 0
    scale: float = 1.0

    @property
    def step(self) -> StepTime | None:
        """T_infer(B, b) as a function of b, up to `most`."""
        return None if self.model is None else _steps(self.model, self.train_batch, self.scale, self.most).__getitem__

    def shape(self, stream: Stream) -> Shape:
        """What the stream's requests cost here."""
        if self.model is None:
            return Shape()
        return stream.shape(self.scale * self.model.prefill_s_per_token, self.model.output_tokens)

    def mode(self, stream: Stream) -> Mode:
        """The ideal mode for one stream."""
        return _mode(self, self.shape(stream), stream.slo)

    def expected(self, stream: Stream, prompt_tokens: int, b: int) -> Expected | None:
        """What one request with such a prompt takes as one of `b`; None without a fit."""
        step, shape = self.step, self.shape(stream)
        if step is None or self.model is None:
            return None
        own_s = self.scale * self.model.prefill_s(stream.computed * prompt_tokens)
        own = msgspec.structs.replace(shape, prefill_s=own_s)
        b = min(b, self.most)
        return Expected(first_s(step, own, b), token_s(step, shape, b), self.scale)


def modes(fits: Iterable[Fit], streams: Mapping[str, Stream]) -> dict[Fit, dict[str, Mode]]:
    """The ideal modes by stream, worked out once for replicas that are alike."""
    return {fit: {key: fit.mode(stream) for key, stream in streams.items()} for fit in dict.fromkeys(fits)}


class Pace(Struct, frozen=True):
    """One request on a replica: seconds of prefill a prompt token, of an output token; expected output tokens."""

    prefill_s_per_token: float
    token_s: float
    output_tokens: float

    def latest_start_s(self, arrival_s: float, prompt_tokens: int, max_tokens: int, slo: Slo) -> float | None:
        """When it must begin to keep its first-token and its end-to-end limit (Unix seconds).

        None if it has neither, or never could keep one of them: then the estimate is no ground to refuse it.
        """
        prefill_s = self.prefill_s_per_token * prompt_tokens
        whole_s = prefill_s + min(self.output_tokens, max_tokens) * self.token_s
        limits = ((slo.ttft_s, prefill_s + self.token_s), (slo.e2e_s, whole_s))
        slack_s = min((limit - least for limit, least in limits if limit is not None), default=-1.0)
        return arrival_s + slack_s if slack_s > 0 else None


def fastest(fits: Iterable[Fit], stream: Stream | None) -> Pace | None:
    """The pace of the replica that is through first with a request of the stream; None where one of them has no fit.

    It is the pace amid its ideal batch. Under lasting overload the queue serves everybody at the last moment there is:
    by the pace of a request alone, or amid fewer, that moment is too late for all of them.
    """
    if stream is None:
        return None
    paces: list[Pace] = []
    for fit in dict.fromkeys(fits):
        if fit.model is None:
            return None
        paces.append(_pace(fit, fit.shape(stream), stream.slo))
    tokens = stream.computed * stream.prompt_tokens
    best = min(paces, key=lambda pace: _whole_s(pace, tokens), default=None)
    if best is None:
        return None
    return msgspec.structs.replace(best, prefill_s_per_token=stream.computed * best.prefill_s_per_token)


@lru_cache(maxsize=4096)
def _mode(fit: Fit, shape: Shape, slo: Slo) -> Mode:
    return serving_mode(fit.step, shape, [slo], fit.most)


@lru_cache(maxsize=1024)
def _steps(model: LatencyModel, train_batch: int, scale: float, most: int) -> tuple[float, ...]:
    return tuple(scale * model.iteration_s(train_batch, b) for b in range(most + 1))


@lru_cache(maxsize=4096)
def _pace(fit: Fit, shape: Shape, slo: Slo) -> Pace:
    """Of a request of which every prompt token has to be computed."""
    step, b = fit.step, _mode(fit, shape, slo).b
    assert fit.model is not None
    assert step is not None
    own_s = first_s(step, shape, b) - step(b)
    stretch = own_s / shape.prefill_s if shape.prefill_s > 0 else 1.0
    return Pace(stretch * fit.scale * fit.model.prefill_s_per_token, token_s(step, shape, b), shape.output_tokens)


def _whole_s(pace: Pace, prompt_tokens: float) -> float:
    return pace.prefill_s_per_token * prompt_tokens + pace.output_tokens * pace.token_s
