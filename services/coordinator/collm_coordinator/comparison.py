"""What was measured, beside what the law said of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

from collm_common.latency import Line
from collm_common.types import BatchSizes
from collm_coordinator.samples import Grid

LEAST_COUNT = 2


class Timing(Struct, frozen=True):
    """`count` durations of `seconds` on average at `sizes`, which `line` predicts."""

    sizes: BatchSizes
    seconds: float
    count: int
    line: Line

    @property
    def predicted_s(self) -> float:
        """By the line."""
        return self.line.predict(self.sizes.train, self.sizes.infer)

    def familiar(self, grid: Grid) -> bool:
        """Whether the line should be right here: it was told by measurements, and some of them at these very sizes."""
        identified = self.line.sequence_identified and (self.line.train_identified or not self.sizes.train)
        return identified and grid.cells.get(self.sizes, (0.0, 0))[1] >= LEAST_COUNT


class Comparison(Struct, frozen=True):
    """Mean seconds of one report, over `count` durations; `part` is alone, infer or train.

    `drifted` is the factor of a lasting shift, None while there is none.
    """

    part: str
    predicted_s: float
    measured_s: float
    count: int
    drifted: float | None = None

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s


def compare(part: str, timings: Sequence[Timing]) -> Comparison | None:
    """Means over all durations; None where there is none, or one that is no duration."""
    count = sum(timing.count for timing in timings)
    predicted_s = sum(timing.count * timing.predicted_s for timing in timings)
    measured_s = sum(timing.count * timing.seconds for timing in timings)
    if not predicted_s or not math.isfinite(measured_s):
        return None
    return Comparison(part, predicted_s / count, measured_s / count, count)
