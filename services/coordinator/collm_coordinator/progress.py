"""What training tells of itself: noise scale, fall of the loss, and how large a batch its memory takes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from collm_common.messages import TrainReport

LOSSES = 32
LEAST_LOSSES = 4
REFUSED_AFTER = 3


@dataclass
class Progress:
    """Of one replica in one job: another job's losses and limits say nothing about it.

    `asked` is the micro-batch it was told to run: a trainer that keeps to less, found no memory for it. `steps` counts
    those at the present one.
    """

    job: str = ""
    first_batch: int = 0
    asked: int = 0
    steps: int = 0
    noise_scale: float = 0.0
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES))
    peaks: dict[int, int] = field(default_factory=dict)
    limit_bytes: int = 0
    largest: int | None = None
    _below: int = 0

    def start(self, job: str, batch: int) -> None:
        """A job begins at micro-batch `batch`."""
        self.job, self.first_batch = job, batch
        self.losses.clear()
        self.peaks.clear()
        self.largest = None
        self.ask(batch)

    def ask(self, batch: int) -> None:
        """It is told to run `batch` from now on."""
        self.asked, self.steps, self._below = batch, 0, 0

    def observe(self, report: TrainReport) -> None:
        """One optimiser step."""
        batch = report.sizes.train
        if report.job != self.job:
            self.start(report.job, batch)
        self.first_batch = self.first_batch or batch
        if report.noise_scale is not None and math.isfinite(report.noise_scale):
            self.noise_scale = max(0.0, report.noise_scale)
        if math.isfinite(report.loss):
            self.losses.append(report.loss)
        if report.memory_bytes:
            self.peaks[batch] = max(report.memory_bytes, self.peaks.get(batch, 0))
            self.limit_bytes = report.memory_limit_bytes
        # A report or two may have been on their way when a larger batch was asked for.
        self._below = self._below + 1 if batch < self.asked else 0
        if self._below >= REFUSED_AFTER:
            self.largest = batch
        self.steps += batch == self.asked

    @property
    def loss_fall(self) -> float | None:
        """l, nats a step: the slope through the last losses, 0 where it rises; None before it can be told."""
        if len(self.losses) < LEAST_LOSSES:
            return None
        slope = float(np.polyfit(np.arange(len(self.losses)), np.array(self.losses), 1)[0])
        return max(0.0, -slope)

    def fitting(self, batches: Iterable[int]) -> list[int]:
        """Those that memory takes, at least the smallest."""
        ordered = sorted(batches)
        return [batch for batch in ordered if self._fits(batch)] or ordered[:1]

    def _fits(self, batch: int) -> bool:
        if self.largest is not None and batch > self.largest:
            return False
        return not self.limit_bytes or not self.peaks or self._bytes(batch) <= self.limit_bytes

    def _bytes(self, batch: int) -> float:
        """Peak of a batch: the line through the two largest measured, through the origin while there is one only."""
        *smaller, far = sorted(self.peaks)
        if not smaller:
            return self.peaks[far] * batch / far
        slope = max(0.0, (self.peaks[far] - self.peaks[smaller[-1]]) / (far - smaller[-1]))
        return self.peaks[far] + slope * (batch - far)
