"""Arrival forecast: two averages and a burst guard, so that a surge counts at once and is forgotten slowly."""

from __future__ import annotations

from collections import deque
from math import exp, sqrt

from msgspec import Struct, field

SURPRISE = 3.0
LEAST_BURST = 4


class Forecast(Struct):
    """Requests a second. `fast_s` and `slow_s` are time constants, `burst_s` is what the guard looks back on.

    The guard takes the last `burst_s` seconds at their word when they brought more than chance explains: more than
    three standard deviations above the slow average, if arrivals were Poisson.
    """

    fast_s: float = 2.0
    slow_s: float = 20.0
    burst_s: float = 1.0
    fast: float = 0.0
    slow: float = 0.0
    recent: deque[tuple[int, float]] = field(default_factory=deque)

    def observe(self, arrivals: int, elapsed_s: float) -> None:
        """`arrivals` came in the last `elapsed_s` seconds."""
        if elapsed_s <= 0:
            return
        self.recent.append((arrivals, elapsed_s))
        while len(self.recent) > 1 and sum(seconds for _, seconds in self.recent) > self.burst_s:
            self.recent.popleft()
        rate = arrivals / elapsed_s
        self.fast += (1 - exp(-elapsed_s / self.fast_s)) * (rate - self.fast)
        if (burst := self._burst()) is not None:
            self.fast = max(self.fast, burst)
        self.slow += (1 - exp(-elapsed_s / self.slow_s)) * (rate - self.slow)

    def _burst(self) -> float | None:
        """The highest rate that the last moments make certain, one standard deviation below what was counted."""
        count, seconds, most = 0, 0.0, None
        for arrivals, elapsed_s in reversed(self.recent):
            count, seconds = count + arrivals, seconds + elapsed_s
            usual = self.slow * seconds
            if count >= LEAST_BURST and count > usual + SURPRISE * sqrt(usual):
                most = max(most or 0.0, (count - sqrt(count)) / seconds)
        return most

    @property
    def rate(self) -> float:
        """What to be ready for."""
        return max(self.fast, self.slow)
