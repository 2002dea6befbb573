"""Measured durations on a grid of (B, b), so that steady traffic at one point does not wash out the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from msgspec import Struct

from collm_common.types import BatchSizes

MAX_CELLS = 256
DECAY = 0.9
KEPT_COUNT = 100


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
        """Fold in the mean of `count` measurements."""
        mean, seen = self.cells.pop(sizes, (seconds, 0))
        share = max(1 - DECAY, count / (count + seen))
        self.cells[sizes] = (mean + share * (seconds - mean), min(KEPT_COUNT, seen + count))
        if len(self.cells) > MAX_CELLS:
            del self.cells[next(iter(self.cells))]

    def points(self, keep: Callable[[BatchSizes], bool] = lambda sizes: True) -> list[Point]:
        """The cells that `keep` lets through."""
        return list(self._points(keep))

    def _points(self, keep: Callable[[BatchSizes], bool]) -> Iterator[Point]:
        for sizes, (mean, count) in self.cells.items():
            if keep(sizes):
                yield Point(sizes.train, sizes.infer, mean, count)


def pooled(grids: Iterable[Grid]) -> list[Point]:
    """What several replicas measured, as one: the count-weighted mean of each (B, b)."""
    sums: dict[BatchSizes, tuple[float, int]] = {}
    for grid in grids:
        for point in grid.points():
            sizes = BatchSizes(point.train, point.infer)
            seconds, count = sums.get(sizes, (0.0, 0))
            sums[sizes] = (seconds + point.seconds * point.count, count + point.count)
    return [Point(sizes.train, sizes.infer, seconds / count, count) for sizes, (seconds, count) in sums.items()]
