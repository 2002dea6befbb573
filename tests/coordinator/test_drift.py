"""Shifts that last are told from noise."""

from __future__ import annotations

import random

import pytest

from collm_coordinator.drift import Drift


def alarms(ratios: list[float]) -> list[tuple[int, float]]:
    drift = Drift()
    found = [(number, drift.observe(ratio)) for number, ratio in enumerate(ratios)]
    return [(number, factor) for number, factor in found if factor is not None]


def test_noise_is_no_drift() -> None:
    """Samples thrown away again and again while nothing changes."""
    draw = random.Random(1)
    assert alarms([1 + draw.uniform(-0.1, 0.1) for _ in range(2000)]) == []


@pytest.mark.parametrize(("factor", "within"), [(1.3, 5), (2.0, 1), (0.5, 1), (0.7, 3)])
def test_a_lasting_shift_is_told_with_its_factor(factor: float, within: int) -> None:
    """A law of yesterday, obeyed until its last sample has faded."""
    number, told = alarms([1.0] * 50 + [factor] * 10)[0]
    assert number - 50 < within
    assert told == pytest.approx(factor)
