"""Gradient noise scale tr(Sigma) / |G|^2, from the gradients of single micro-steps (McCandlish et al. 2018, A.1).

With micro-gradients g_i of b_i samples each and their mean g = sum w_i g_i, sum w_i = 1:
    E|g_i|^2 = |G|^2 + tr(Sigma) / b_i        E|g|^2 = |G|^2 + tr(Sigma) sum w_i^2 / b_i
which gives both unknowns without bias. Single estimates may be negative, so averages are kept and only these are
clamped (as Pollux does).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct

DECAY = 0.9
MAX_OVERLAP = 0.9


class MicroGradient(Struct, frozen=True):
    """`square` is |g_i|^2 of a mean loss over `samples`; `weight` its share of the mean gradient, in any unit."""

    square: float
    weight: float
    samples: int


class NoiseScale:
    """Feed it once an optimiser step; `value` is in samples, None until it can be told."""

    def __init__(self, decay: float = DECAY) -> None:
        self._decay = decay
        self._weight = self._signal = self._noise = 0.0

    def update(self, micro: Sequence[MicroGradient], mean_square: float) -> None:
        """`mean_square` is |g|^2 of the weighted mean of the micro-gradients.

        What says nothing is skipped: a single micro-step, values that are not finite, and micro-steps so unequal
        that one of them is nearly the mean.
        """
        squares = [gradient.square for gradient in micro]
        if len(micro) < 2 or not all(map(math.isfinite, (*squares, mean_square))):
            return
        total = sum(gradient.weight for gradient in micro)
        square, single = sum(squares) / len(micro), sum(1 / gradient.samples for gradient in micro) / len(micro)
        joint = sum((gradient.weight / total) ** 2 / gradient.samples for gradient in micro)
        if joint > MAX_OVERLAP * single:
            return
        noise = (square - mean_square) / (single - joint)
        self._average(square - single * noise, noise)

    @property
    def value(self) -> float | None:
        """tr(Sigma) / |G|^2 of the averages; None without a step, or while the signal drowns in noise."""
        if self._weight == 0.0:
            return None
        signal, noise = self._signal / self._weight, max(0.0, self._noise / self._weight)
        return noise / signal if signal > 0 else None

    def _average(self, signal: float, noise: float) -> None:
        self._weight += (1 - self._decay) * (1 - self._weight)
        self._signal += (1 - self._decay) * (signal - self._signal)
        self._noise += (1 - self._decay) * (noise - self._noise)
