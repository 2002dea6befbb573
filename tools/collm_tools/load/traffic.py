"""When requests arrive: pure, seeded arrival processes. Times are seconds from the start of the run, ascending."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from collm_common.errors import DataError


@dataclass(frozen=True)
class Arrival:
    """One offered request; lengths are None where the process says nothing about them."""

    at_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        if not value > 0:
            raise DataError(f"must be > 0, is {value:g}", field=name)


def gamma(rate: float, cv: float, duration_s: float, seed: int = 0) -> list[Arrival]:
    """Independent gamma gaps: mean 1/rate seconds, coefficient of variation `cv` (1 is Poisson, above is bursty)."""
    _require_positive(rate=rate, cv=cv, duration_s=duration_s)
    rng = random.Random(seed)
    shape = 1 / cv**2
    return list(_until(duration_s, lambda: rng.gammavariate(shape, 1 / (rate * shape))))


def poisson(rate: float, duration_s: float, seed: int = 0) -> list[Arrival]:
    """Independent exponential gaps of mean 1/rate seconds."""
    return gamma(rate, 1.0, duration_s, seed)


def on_off(rate: float, on_s: float, off_s: float, duration_s: float, seed: int = 0) -> list[Arrival]:
    """Poisson at `rate` during windows of `on_s` seconds, silence for `off_s` between them."""
    _require_positive(rate=rate, on_s=on_s, off_s=off_s, duration_s=duration_s)
    period = on_s + off_s
    cycles, rest = divmod(duration_s, period)
    busy_s = cycles * on_s + min(rest, on_s)
    return [
        replace(arrival, at_s=(arrival.at_s // on_s) * period + arrival.at_s % on_s)
        for arrival in poisson(rate, busy_s, seed)
    ]


def phases(parts: Sequence[tuple[float, float]], seed: int = 0) -> list[Arrival]:
    """Poisson stretches one after the other, each (rate, seconds); a rate of 0 is silence."""
    arrivals: list[Arrival] = []
    start_s = 0.0
    for index, (rate, duration_s) in enumerate(parts):
        if rate > 0:
            arrivals += shift(poisson(rate, duration_s, seed + index), start_s)
        start_s += duration_s
    return arrivals


def scale(arrivals: Iterable[Arrival], factor: float) -> list[Arrival]:
    """Plays a trace `factor` times as fast: time is compressed or stretched, no arrival is left out."""
    _require_positive(scale=factor)
    return [replace(arrival, at_s=arrival.at_s / factor) for arrival in arrivals]


def shift(arrivals: Iterable[Arrival], by_s: float) -> list[Arrival]:
    """The same arrivals `by_s` seconds later."""
    return [replace(arrival, at_s=arrival.at_s + by_s) for arrival in arrivals]


def cut(arrivals: Iterable[Arrival], duration_s: float) -> list[Arrival]:
    """The arrivals before `duration_s`."""
    return [arrival for arrival in arrivals if arrival.at_s < duration_s]


def _until(duration_s: float, gap_s: Callable[[], float]) -> Iterator[Arrival]:
    at_s = gap_s()
    while at_s < duration_s:
        yield Arrival(at_s)
        at_s += gap_s()
