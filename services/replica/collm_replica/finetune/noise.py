"""Gradient noise scale tr(Sigma) / |G|^2, from the gradients of single micro-steps (McCandlish et al. 2018, A.1).

With n micro-gradients g_i of B samples each and their mean g:
    E|g_i|^2 = |G|^2 + tr(Sigma) / B        E|g|^2 = |G|^2 + tr(Sigma) / (n B)
which gives both unknowns. Single estimates may be negative, so averages are kept and only these are clamped (as Pollux
does). With one micro-step a step, two consecutive gradients make the pair.
"""

from __future__ import annotations

import math

DECAY = 0.9


class NoiseScale:
    """Feed it squared norms, one call an optimiser step; `value` is in samples, None until it can be told."""

    def __init__(self, decay: float = DECAY) -> None:
        self._decay = decay
        self._weight = self._signal = self._noise = 0.0

    def update(self, micro_square: float, mean_square: float, micro_steps: int, batch: int) -> None:
        """`micro_square`: mean of |g_i|^2; `mean_square`: |mean of g_i|^2; both of gradients of mean losses.

        Steps that are not finite say nothing and are skipped; so does one micro-step.
        """
        if micro_steps < 2 or not (math.isfinite(micro_square) and math.isfinite(mean_square)):
            return
        signal = (micro_steps * mean_square - micro_square) / (micro_steps - 1)
        noise = (micro_square - mean_square) * batch * micro_steps / (micro_steps - 1)
        self._weight = self._decay * self._weight + 1 - self._decay
        self._signal += (1 - self._decay) * (signal - self._signal)
        self._noise += (1 - self._decay) * (noise - self._noise)

    @property
    def value(self) -> float | None:
        """tr(Sigma) / |G|^2 of the averages; None without a step, or while the signal drowns in noise."""
        if self._weight == 0.0:
            return None
        signal, noise = self._signal / self._weight, max(0.0, self._noise / self._weight)
        return noise / signal if signal > 0 else None
