"""The micro-cycle: how many requests a replica should have in flight, and when to send the next.

Ideal Serving Mode (CoLLM, dispatcher): a replica always runs the largest batch b* that keeps the objective, and is
sent lambda = b* / S(b*) requests a second; by Little's law that keeps b* of them in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from collm_common.types import Slo
from collm_dispatcher.policy.rooms import Rooms

StepTime = Callable[[int], float]
"""T_infer(b): seconds of one engine iteration with b running sequences."""


class Shape(Struct, frozen=True):
    """What a stream's requests cost beyond the step time: seconds of prefill, expected output tokens."""

    prefill_s: float = 0.0
    output_tokens: float = 1.0


class Mode(Struct, frozen=True):
    """At most `b` in flight; each takes `service_s` (None: not known yet)."""

    b: int
    service_s: float | None = None

    @property
    def rate(self) -> float | None:
        """lambda = b / S(b), requests a second; None without a fit."""
        return self.b / self.service_s if self.service_s else None


def service_s(step: StepTime, shape: Shape, b: int) -> float:
    """S(b) = prefill + L * T_infer(b), seconds."""
    return shape.prefill_s + shape.output_tokens * step(b)


def least_s(step: StepTime, prefill_s: float, output_tokens: float, max_tokens: int, slo: Slo) -> float:
    """Seconds that one request takes, alone in its batch, to what its deadline is about: its first token or its last.

    `output_tokens` is the expected length of an answer.
    """
    first_only = slo.e2e_s is None and slo.tpot_s is None
    return service_s(step, Shape(prefill_s, 1.0 if first_only else min(output_tokens, max_tokens)), 1)


def latest_s(arrival_s: float, deadline_s: float, least: float) -> float | None:
    """When a request must begin to be in time; None if it never could be: then the estimate has no say."""
    return deadline_s - least if least < deadline_s - arrival_s else None


def keeps(slo: Slo, step: StepTime, shape: Shape, b: int) -> bool:
    """Whether a batch of `b` keeps every limit: S(b) <= e2e, T_infer(b) <= tpot, prefill and one step <= ttft."""
    pairs = (
        (slo.e2e_s, service_s(step, shape, b)),
        (slo.tpot_s, step(b)),
        (slo.ttft_s, shape.prefill_s + step(b)),
    )
    return all(limit is None or value <= limit for limit, value in pairs)


def serving_mode(step: StepTime | None, shape: Shape, slos: Sequence[Slo], most: int) -> Mode:
    """b*, the largest batch of at most `most` that keeps every objective; `most` without a fit.

    An objective that even a single sequence misses is left out: it must not slow the others down for nothing.
    """
    if step is None:
        return Mode(most)
    feasible = [slo for slo in slos if keeps(slo, step, shape, 1)]
    b = next((b for b in range(most, 0, -1) if all(keeps(slo, step, shape, b) for slo in feasible)), 1)
    return Mode(b, service_s(step, shape, b))


def combined_mode(step: StepTime | None, shape: Shape, cap: int) -> Mode:
    """The coordinator's cap, with the service time the fit gives it."""
    return Mode(cap, None if step is None else service_s(step, shape, cap))


def due_s(now: float, queued: int, room: int, deadline_s: float, mode: Mode, hold_s: float) -> float:
    """When to release: now if the queue fills the room, else after `hold_s` but never past the slack of the deadline.

    Without a fit the slack is unknown, so nothing is held back.
    """
    if queued >= room or mode.service_s is None:
        return now
    return min(now + hold_s, max(now, deadline_s - mode.service_s))


class Room(Struct, frozen=True):
    """A replica that takes requests: `in_flight` of at most `b`."""

    id: str
    b: int
    in_flight: int


def deal(rooms: Sequence[Room], count: int) -> list[str]:
    """Who gets the next `count` requests, in order: always the one with the smallest share of its b in flight.

    Ties go to the earlier in `rooms`; the list is shorter than `count` where the room ends.
    """
    pool = Rooms()
    for rank, room in enumerate(rooms):
        pool.set(room.id, rank, room.b, room.in_flight)
    dealt: list[str] = []
    while len(dealt) < count and (id_ := pool.take()) is not None:
        dealt.append(id_)
    return dealt
