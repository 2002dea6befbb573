"""Arrival forecast: two exponential averages, so that a burst counts at once and is forgotten slowly."""

from __future__ import annotations

from math import exp

from msgspec import Struct


class Forecast(Struct):
    """Requests a second. `fast_s` and `slow_s` are time constants; the burst guard is the larger of both averages."""

    fast_s: float = 2.0
    slow_s: float = 20.0
    fast: float = 0.0
    slow: float = 0.0

    def observe(self, arrivals: int, elapsed_s: float) -> None:
        """`arrivals` came in the last `elapsed_s` seconds."""
        if elapsed_s <= 0:
            return
        rate = arrivals / elapsed_s
        self.fast += (1 - exp(-elapsed_s / self.fast_s)) * (rate - self.fast)
        self.slow += (1 - exp(-elapsed_s / self.slow_s)) * (rate - self.slow)

    @property
    def rate(self) -> float:
        """What to be ready for."""
        return max(self.fast, self.slow)
