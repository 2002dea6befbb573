"""When fine-tuning must let decoding go first: between two micro-steps, before a coordinator can know of it."""

from __future__ import annotations

NEAR, CLEAR, SMOOTHING = 0.9, 0.7, 0.2


class Pressure:
    """`high` while engine steps near the shortest time per output token (TPOT) that a running request asks for.

    Steps are smoothed: one slow step is no reason. It ends where they are well below the limit again, or nobody asks.
    """

    def __init__(self) -> None:
        self.high = False
        self._step_s: float | None = None

    def update(self, step_s: float, tpot_s: float | None) -> bool:
        """Account for one step beside requests of which the strictest asks for `tpot_s`; whether `high` has changed."""
        before = step_s if self._step_s is None else self._step_s
        self._step_s = before + SMOOTHING * (step_s - before)
        was = self.high
        self.high = tpot_s is not None and self._step_s > (CLEAR if was else NEAR) * tpot_s
        return self.high != was

    def rest(self) -> bool:
        """There is nothing to step; whether `high` has changed."""
        was, self.high, self._step_s = self.high, False, None
        return was
