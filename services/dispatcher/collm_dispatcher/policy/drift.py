"""How far the predictions of a replica's latency are from what was measured."""

from __future__ import annotations

from math import exp2, log

WEIGHT = 0.05
LEAST = 16
MOST_OFF = 3.0
STEPS = 32 / log(2)
"""Factors are powers of two in steps of 1/32: a correction that hardly changes makes no new modes, and no new plan."""


class Drift:
    """The factor to correct the next predictions by: a geometric moving average of measured over predicted."""

    def __init__(self) -> None:
        self._log = 0.0
        self._seen = 0

    def observe(self, predicted_s: float, corrected_by: float, measured_s: float) -> None:
        """A prediction that had been `corrected_by` a factor already, and its outcome; no time at all says nothing."""
        if predicted_s <= 0 or measured_s <= 0 or corrected_by <= 0:
            return
        off = log(min(MOST_OFF, max(1 / MOST_OFF, corrected_by * measured_s / predicted_s)))
        self._seen += 1
        self._log += max(WEIGHT, 1 / self._seen) * (off - self._log)

    @property
    def factor(self) -> float:
        """1 until enough was measured; within [1/3, 3], and within 1.1 % of what was measured."""
        return min(MOST_OFF, max(1 / MOST_OFF, exp2(round(STEPS * self._log) / 32))) if self._seen >= LEAST else 1.0
