"""The gradient noise scale of distributions whose noise scale is known."""

from __future__ import annotations

import math

import pytest
import torch
from collm_replica.finetune.noise import NoiseScale

DIMENSIONS = 200


def estimate(micro_steps: int, batch: int, sigma: float, steps: int = 3000) -> float | None:
    """Feed gradients with |G| = 1 and per-sample covariance sigma^2 I; the truth is DIMENSIONS sigma^2."""
    generator = torch.Generator().manual_seed(micro_steps * 100 + batch)
    signal = torch.zeros(DIMENSIONS)
    signal[0] = 1.0
    scale = NoiseScale(decay=0.999)
    for _ in range(steps):
        noise = torch.randn(micro_steps, DIMENSIONS, generator=generator) * sigma / math.sqrt(batch)
        micro = signal + noise
        scale.update(float(micro.pow(2).sum(1).mean()), float(micro.mean(0).pow(2).sum()), micro_steps, batch)
    return scale.value


@pytest.mark.parametrize(("micro_steps", "batch"), [(2, 1), (2, 8), (8, 4)])
@pytest.mark.parametrize("sigma", [0.05, 0.2])
def test_it_is_the_trace_of_the_covariance_over_the_squared_gradient(
    micro_steps: int, batch: int, sigma: float
) -> None:
    """A noise scale that is off by the number of micro-steps or the batch (sum and mean of gradients mixed up)."""
    assert estimate(micro_steps, batch, sigma) == pytest.approx(DIMENSIONS * sigma**2, rel=0.1)


def test_what_says_nothing_is_skipped() -> None:
    """One overflow that spoils the average for ever, or a noise scale made of a single gradient."""
    scale = NoiseScale()
    scale.update(4.0, 4.0, 1, 8)
    scale.update(float("inf"), 1.0, 4, 8)
    scale.update(1.0, float("nan"), 4, 8)
    assert scale.value is None
    scale.update(2.0, 1.0, 2, 4)
    assert scale.value is None
    scale.update(2.0, 1.9, 2, 4)
    assert scale.value is not None
