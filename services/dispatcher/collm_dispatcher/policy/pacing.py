"""The ideal mode of a replica: how many requests it should have in flight, and how fast they then pass.

Ideal Serving Mode (CoLLM, dispatcher): a replica always runs the largest batch b* that keeps the objective, and is
sent lambda = b* / S(b*) requests a second; by Little's law that keeps b* of them in flight.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from msgspec import Struct

from collm_common.types import Slo

StepTime = Callable[[int], float]
"""T_infer(b): seconds of one engine iteration with b running sequences; it must not fall with b."""

WAIT = 0.2
"""Under overload everybody is released at the last moment there is: a batch made for the whole limit is late then."""


class Shape(Struct, frozen=True):
    """What a stream's requests cost beyond the step time: seconds of prefill, expected output tokens.

    `lengths` are output lengths at evenly spaced quantiles, rising; without them every answer has the expected one.
    """

    prefill_s: float = 0.0
    output_tokens: float = 1.0
    lengths: tuple[float, ...] = ()

    def share_up_to(self, tokens: float) -> float:
        """Share of the answers that have at most so many tokens."""
        lengths = self.lengths or (self.output_tokens,)
        return bisect_right(lengths, tokens) / len(lengths)


class Mode(Struct, frozen=True):
    """At most `b` in flight; each takes `service_s` (None: not known yet)."""

    b: int
    service_s: float | None = None

    @property
    def rate(self) -> float | None:
        """lambda = b / S(b), requests a second; None without a fit."""
        return self.b / self.service_s if self.service_s else None


def service_s(step: StepTime, shape: Shape, b: int) -> float:
    """S(b) = b * prefill + L * T_infer(b), seconds.

    While one of b requests is answered, by Little's law b others arrive, and the prefill of each stops its decoding.
    """
    return b * shape.prefill_s + shape.output_tokens * step(b)


def token_s(step: StepTime, shape: Shape, b: int) -> float:
    """Seconds per output token among b requests: an iteration, and a token's share of the others' prefills."""
    return step(b) + (b - 1) * shape.prefill_s / max(1.0, shape.output_tokens)


def first_s(step: StepTime, shape: Shape, b: int) -> float:
    """Seconds to the first token: the prefill, stretched by the share of time that others prefill, and an iteration."""
    total = service_s(step, shape, b)
    others = (b - 1) * shape.prefill_s / total if total > 0 else 0.0
    return shape.prefill_s / (1 - others) + step(b)


def attained(slo: Slo, step: StepTime, shape: Shape, b: int, wait: float = 0.0) -> float:
    """Share of the requests that keep every limit in a batch of `b`: what an end-to-end limit leaves of the lengths.

    `wait` is the share of the limits on the first and the last token that goes by before a request is released.
    """
    per_token_s = token_s(step, shape, b)
    if slo.ttft_s is not None and first_s(step, shape, b) > (1 - wait) * slo.ttft_s:
        return 0.0
    if slo.tpot_s is not None and per_token_s > slo.tpot_s:
        return 0.0
    if slo.e2e_s is None:
        return 1.0
    left_s = (1 - wait) * slo.e2e_s - shape.prefill_s
    if left_s < 0:
        return 0.0
    return shape.share_up_to(left_s / per_token_s + 1e-9) if per_token_s > 0 else 1.0


def keeps(slo: Slo, step: StepTime, shape: Shape, b: int) -> bool:
    """Whether every request of the stream keeps every limit in a batch of `b`."""
    return attained(slo, step, shape, b) >= 1.0


def largest(slo: Slo, step: StepTime, shape: Shape, most: int, share: float) -> int:
    """The largest batch of at most `most` in which `share` of the requests keep it after a wait; 0 if there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if attained(slo, step, shape, middle, WAIT) >= share:
            low = middle
        else:
            high = middle - 1
    return low


def best(slo: Slo, step: StepTime, shape: Shape, most: int) -> int:
    """b*: of the largest batches for each attainable share, the one with the most output tokens in time a second.

    0 if the objective cannot be kept at all. With answers of one length it is the largest batch that keeps it and
    leaves the share WAIT of the limits for waiting; 1 if even that one leaves less.
    """
    top = attained(slo, step, shape, 1, WAIT)
    if not top:
        return int(attained(slo, step, shape, 1) > 0)
    levels = len(shape.lengths) if slo.e2e_s is not None and shape.lengths else 1
    found, score = 0, 0.0
    for level in range(levels, 0, -1):
        share = level / levels
        if share > top:
            continue
        b = largest(slo, step, shape, most, share)
        total = service_s(step, shape, b)
        worth = sum(shape.lengths[:level]) / levels if shape.lengths else share
        value = worth * b / total if total > 0 else worth * b
        if value > score:
            found, score = b, value
        if b == most:
            break
    return found


def serving_mode(step: StepTime | None, shape: Shape, slos: Sequence[Slo], most: int) -> Mode:
    """The largest batch of at most `most` that is right for every objective; `most` without a fit.

    An objective that even a single sequence misses is left out: it must not slow the others down for nothing.
    """
    if step is None:
        return Mode(most)
    batches = [b for slo in slos if (b := best(slo, step, shape, most))]
    b = min(batches, default=most)
    return Mode(b, service_s(step, shape, b))


def due_s(now: float, queued: int, room: int, deadline_s: float, mode: Mode, hold_s: float) -> float:
    """When to release: now if the queue fills the room, else after `hold_s` but never past the slack of the deadline.

    Without a fit the slack is unknown, so nothing is held back.
    """
    if queued >= room or mode.service_s is None:
        return now
    return min(now + hold_s, max(now, deadline_s - mode.service_s))
