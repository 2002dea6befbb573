"""When a law no longer holds: the cumulative sum of log(measured / predicted), both ways (Page 1954)."""

from __future__ import annotations

import math
from dataclasses import dataclass

SLACK = 0.1
ALARM = 0.5


@dataclass
class Drift:
    """A lasting shift of 20 % is told after about five reports, a doubling at once; noise of 10 % never."""

    up: float = 0.0
    down: float = 0.0
    shift: float = 0.0
    reports: int = 0

    def observe(self, ratio: float) -> float | None:
        """The factor by which durations have changed, once they have; None else. `ratio` is measured / predicted."""
        value = math.log(ratio)
        self.up = max(0.0, self.up + value - SLACK)
        self.down = max(0.0, self.down - value - SLACK)
        if self.up == 0 and self.down == 0:
            self.shift, self.reports = 0.0, 0
            return None
        self.shift, self.reports = self.shift + value, self.reports + 1
        if max(self.up, self.down) < ALARM:
            return None
        factor = math.exp(self.shift / self.reports)
        self.up = self.down = self.shift = 0.0
        self.reports = 0
        return factor
