"""A likeness of a recorded trace, small enough for the repository: rates by minute, gaps, lengths by quantile."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec import Struct

from collm_common.errors import DataError
from collm_tools.load.traffic import Arrival

QUANTILES = 100
MINUTE_S = 60.0


class Likeness(Struct, frozen=True):
    """`per_minute` counts requests; `cv` is the coefficient of variation of the gaps inside a minute.

    `prompts` and `outputs` are lengths at evenly spaced quantiles; they are drawn apart, for in these traces the one
    does not predict the other. `source` says whose trace it is.
    """

    source: str
    per_minute: tuple[int, ...]
    cv: float
    prompts: tuple[int, ...]
    outputs: tuple[int, ...]


def describe(arrivals: Sequence[Arrival], source: str) -> Likeness:
    """Of a trace with lengths."""
    minutes: dict[int, list[float]] = {}
    for arrival in arrivals:
        minutes.setdefault(int(arrival.at_s / MINUTE_S), []).append(arrival.at_s)
    return Likeness(
        source=source,
        per_minute=tuple(len(minutes.get(n, ())) for n in range(max(minutes) + 1)),
        cv=statistics.median(_cv(times) for times in minutes.values() if len(times) > 20),
        prompts=_quantiles([arrival.prompt_tokens or 1 for arrival in arrivals]),
        outputs=_quantiles([arrival.output_tokens or 1 for arrival in arrivals]),
    )


def play(likeness: Likeness, seed: int = 0) -> list[Arrival]:
    """Arrivals with these rates, burstiness and lengths: gamma gaps inside each minute, as many as it had."""
    draw = random.Random(seed)
    found: list[Arrival] = []
    shape = 1 / likeness.cv**2
    for minute, count in enumerate(likeness.per_minute):
        gaps = [draw.gammavariate(shape, 1.0) for _ in range(count + 1)]
        scale, at_s = MINUTE_S / sum(gaps), minute * MINUTE_S
        for gap in gaps[:count]:
            at_s += gap * scale
            found.append(Arrival(at_s, draw.choice(likeness.prompts), draw.choice(likeness.outputs)))
    return found


def read(path: Path) -> Likeness:
    """Raises DataError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Likeness)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(f"{path}: {error}", field="trace") from error


def _cv(times: Sequence[float]) -> float:
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return statistics.pstdev(gaps) / max(1e-9, statistics.fmean(gaps))


def _quantiles(values: Sequence[int]) -> tuple[int, ...]:
    ordered = sorted(values)
    return tuple(ordered[int((n + 0.5) / QUANTILES * len(ordered))] for n in range(QUANTILES))
