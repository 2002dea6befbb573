"""Which (B, b) to measure next, so that the fewest measurements tell the law (active learning by committee).

A straight line is told by the corners; what f(B) is in between is not. So each further point goes where the shapes
that are possible after the points so far differ most, until they agree everywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np
from msgspec import Struct

from collm_common.types import BatchSizes
from collm_coordinator.samples import Point
from collm_coordinator.shape import Candidate, candidates

MIN_PROBES = 8
MAX_PROBES = 12
AGREED = 0.4
PLAUSIBLE = 3.0
LEAST_ERROR = 0.1

Cell = tuple[int, int]


class Probe(Struct, frozen=True):
    """Measure here next; the reason is for people."""

    sizes: BatchSizes
    reason: str


def next_probe(
    points: Sequence[Point], trains: Sequence[int], infers: Sequence[int], asked: Collection[Cell] = ()
) -> Probe | None:
    """Which of `trains` x `infers` to measure after `points`; None once the law is told, or MAX_PROBES are measured.

    `points` belong to one SM share and have B >= 1; what was `asked` for already is not asked again. Differences are
    in units of the points' own standard deviation.
    """
    measured = {(point.train, point.infer) for point in points} | set(asked)
    left = [cell for cell in itertools.product(sorted(set(trains)), sorted(set(infers))) if cell not in measured]
    if len(measured) >= MAX_PROBES or not left:
        return None
    if corner := next((corner for corner in _corners(trains, infers) if corner in left), None):
        return _probe(corner, "a corner of the grid")
    if not points:
        return None
    deviation_s = float(np.std([point.seconds for point in points])) or 1.0
    committee = _plausible(points, deviation_s)
    ranked = [(_dispute(committee, cell) / deviation_s, _distance(cell, points), cell) for cell in left]
    dispute, _, cell = max(ranked, key=lambda ranked: (round(ranked[0], 2), *ranked[1:]))
    if dispute > AGREED:
        return _probe(cell, f"{len(committee)} shapes differ by {dispute:.1f} standard deviations")
    if len(points) < MIN_PROBES:
        return _probe(max((distance, cell) for _, distance, cell in ranked)[1], "far from all that is measured")
    return None


def _probe(cell: Cell, reason: str) -> Probe:
    return Probe(BatchSizes(*cell), reason)


def _corners(trains: Sequence[int], infers: Sequence[int]) -> list[Cell]:
    """Cheapest first."""
    low, high = (min(trains), min(infers)), (max(trains), max(infers))
    return [low, high, (low[0], high[1]), (high[0], low[1])]


def _plausible(points: Sequence[Point], deviation_s: float) -> list[Candidate]:
    """The shapes about as good as the best one, as far as these points can tell."""
    found = candidates(points, tells_infer=True)
    allowed_s = PLAUSIBLE * max(LEAST_ERROR * deviation_s, min(candidate.error_s for candidate in found))
    return [candidate for candidate in found if candidate.error_s <= allowed_s]


def _dispute(committee: Sequence[Candidate], cell: Cell) -> float:
    predicted = [candidate.predict(*cell) for candidate in committee]
    return max(predicted) - min(predicted)


def _distance(cell: Cell, points: Sequence[Point]) -> float:
    """To the nearest point: in doublings of B, and in b as a share of the largest."""
    widest = max(*(point.infer for point in points), cell[1])
    return min(
        abs(math.log2(cell[0] / max(1, point.train))) / 4 + abs(cell[1] - point.infer) / widest for point in points
    )
