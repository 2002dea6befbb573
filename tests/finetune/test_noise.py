"""The gradient noise scale of distributions whose noise scale is known."""

from __future__ import annotations

import math

import pytest
import torch

from collm_replica.finetune.noise import MicroGradient, NoiseScale

DIMENSIONS = 200


def estimate(batches: tuple[int, ...], weights: tuple[float, ...], sigma: float, steps: int = 3000) -> float | None:
    """Feed gradients with |G| = 1 and per-sample covariance sigma^2 I; the truth is DIMENSIONS sigma^2."""
    generator = torch.Generator().manual_seed(sum(batches) * 100 + len(batches))
    signal = torch.zeros(DIMENSIONS)
    signal[0] = 1.0
    deviation = sigma / torch.tensor(batches, dtype=torch.float32).sqrt()
    share = torch.tensor(weights) / sum(weights)
    scale = NoiseScale(decay=0.999)
    for _ in range(steps):
        micro = signal + torch.randn(len(batches), DIMENSIONS, generator=generator) * deviation[:, None]
        squares = micro.pow(2).sum(1).tolist()
        fed = [MicroGradient(*row) for row in zip(squares, weights, batches, strict=True)]
        scale.update(fed, float((share @ micro).pow(2).sum()))
    return scale.value


@pytest.mark.parametrize(
    ("batches", "weights"),
    [
        ((1, 1), (1, 1)),
        ((8, 8), (1, 1)),
        ((4,) * 8, (1,) * 8),
        ((4, 4, 4), (10, 40, 70)),
        ((2, 2, 8, 8), (20, 25, 90, 70)),
    ],
)
@pytest.mark.parametrize("sigma", [0.05, 0.2])
def test_it_is_the_trace_of_the_covariance_over_the_squared_gradient(
    batches: tuple[int, ...], weights: tuple[float, ...], sigma: float
) -> None:
    """A noise scale that is off by the number of micro-steps or the batch, by unequal answers, or by a new batch."""
    assert estimate(batches, weights, sigma) == pytest.approx(DIMENSIONS * sigma**2, rel=0.1)


def test_what_says_nothing_is_skipped() -> None:
    """One overflow that spoils the average for ever, or a noise scale made of a single gradient."""

    def pair(first: float, second: float, weight: float = 1.0) -> list[MicroGradient]:
        return [MicroGradient(first, weight, 4), MicroGradient(second, 1.0, 4)]

    scale = NoiseScale()
    scale.update(pair(4.0, 4.0)[:1], 4.0)
    scale.update(pair(math.inf, 1.0), 1.0)
    scale.update(pair(1.0, 1.0), math.nan)
    scale.update(pair(2.0, 2.0, weight=1000.0), 1.9)
    assert scale.value is None
    scale.update(pair(2.0, 2.0), 1.9)
    assert scale.value is not None


def test_averages_are_clamped_and_not_the_single_estimates() -> None:
    """A noise scale that is biased upwards because negative estimates count as zero."""
    scale = NoiseScale(decay=0.5)
    scale.update([MicroGradient(2.0, 1.0, 4)] * 2, 0.5)
    assert scale.value is None
    scale.update([MicroGradient(2.0, 1.0, 4)] * 2, 1.9)
    averages = (2 * 1.8 - 1.0) / 3, (2 * 0.8 + 12.0) / 3
    assert scale.value == pytest.approx(averages[1] / averages[0])
    quiet = NoiseScale()
    quiet.update([MicroGradient(1.0, 1.0, 4)] * 2, 1.5)
    assert quiet.value == 0.0
