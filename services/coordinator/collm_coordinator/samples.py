"""Measured durations on a grid of (B, b, SM share), so that steady traffic at one point leaves the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from collm_common.types import BatchSizes

MAX_CELLS = 256
DECAY = 0.9
KEPT_COUNT = 100


Keep = Callable[[BatchSizes], bool]


class Point(Struct, frozen=True):
    """Mean seconds at (B, b), over about `count` measurements."""

    train: int
    infer: int
    seconds: float
    count: int = 1


@dataclass
class Grid:
    """One moving average a cell; the cell that was updated longest ago makes room for a new one."""

    cells: dict[BatchSizes, tuple[float, int]] = field(default_factory=dict)

    def add(self, sizes: BatchSizes, seconds: float, count: int = 1) -> None:
        """Fold in the mean of `count` measurements; what is not finite is no measurement."""
        if not math.isfinite(seconds):
            return
        mean, seen = self.cells.pop(sizes, (seconds, 0))
        share = max(1 - DECAY, count / (count + seen))
        self.cells[sizes] = (mean + share * (seconds - mean), min(KEPT_COUNT, seen + count))
        if len(self.cells) > MAX_CELLS:
            del self.cells[next(iter(self.cells))]

    def rescale(self, factor: float, keep: Keep) -> None:
        """What was measured before everything became `factor` times as slow; the next measurement weighs as much."""
        for sizes, (mean, _) in self.cells.items():
            if keep(sizes):
                self.cells[sizes] = mean * factor, 1

    def shares(self) -> set[float]:
        """SM shares that something was measured at beside training."""
        return {sizes.sm_share for sizes in self.cells if sizes.train}

    def points(self, keep: Keep = lambda sizes: True) -> list[Point]:
        """The cells that `keep` lets through."""
        return list(self._points(keep))

    def _points(self, keep: Keep) -> Iterator[Point]:
        for sizes, (mean, count) in self.cells.items():
            if keep(sizes):
                yield Point(sizes.train, sizes.infer, mean, count)


def alone(sizes: BatchSizes) -> bool:
    """Keeps what was measured without training."""
    return sizes.train == 0


def beside(sm_share: float) -> Keep:
    """Keeps what was measured beside training with that share."""
    return lambda sizes: sizes.train > 0 and sizes.sm_share == sm_share


def pooled(grids: Iterable[Grid], keep: Keep = lambda sizes: True) -> list[Point]:
    """What several replicas measured, as one: the count-weighted mean of each (B, b)."""
    sums: dict[tuple[int, int], tuple[float, int]] = {}
    for grid in grids:
        for point in grid.points(keep):
            seconds, count = sums.get((point.train, point.infer), (0.0, 0))
            sums[point.train, point.infer] = (seconds + point.seconds * point.count, count + point.count)
    return [Point(*cell, seconds / count, count) for cell, (seconds, count) in sums.items()]
