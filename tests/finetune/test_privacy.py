"""Clipping, noise and what they have spent, against definitions computed another way."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
import torch

from collm_common.errors import DataError
from collm_common.messages import Hyperparams
from collm_replica.finetune.privacy import LEDGER, Ledger, epsilon, privatise
from tests.finetune.adapters import adapter, fresh

DELTA = 1e-5


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def length(tensors: dict[str, torch.Tensor], start: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((tensor - start[name]).pow(2).sum()) for name, tensor in tensors.items()))


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 3.0, 20.0])
def test_epsilon_is_where_the_privacy_loss_leaves_delta(mu: float) -> None:
    """An epsilon that is too small, which promises what nobody keeps: delta = E max(0, 1 - exp(e - L)), L the loss."""
    found = epsilon(mu, DELTA)
    loss = torch.linspace(mu**2 / 2 - 12 * mu, mu**2 / 2 + 12 * mu, 400_001, dtype=torch.float64)
    density = torch.exp(-0.5 * ((loss - mu**2 / 2) / mu) ** 2) / (mu * math.sqrt(2 * math.pi))
    kept = torch.clamp(1 - torch.exp(found - loss), min=0)
    assert float(torch.trapezoid(density * kept, loss)) == pytest.approx(DELTA, rel=1e-3)


def test_epsilon_grows_with_what_is_spent_and_is_nothing_at_nothing() -> None:
    """A bisection that runs to its bound, or an overflow for a client that was hardly noised."""
    values = [epsilon(mu, DELTA) for mu in (0.0, 1e-7, 0.1, 1.0, 10.0, 100.0)]
    assert values == sorted(values)
    assert values[:2] == [0.0, 0.0]
    assert 100**2 / 2 < values[-1] < 100**2


def test_a_change_is_shortened_to_the_norm_and_no_further() -> None:
    """A bound on each tensor by itself, or a small change that is blown up to the bound."""
    start = fresh(4)
    whole = length(adapter(1), start)
    for bound, expected in ((whole / 10, whole / 10), (whole * 10, whole)):
        clipped = privatise(adapter(1), start, bound, 0.0, generator())
        assert length(clipped, start) == pytest.approx(expected, rel=1e-4)
    assert length(privatise(start, start, 1.0, 0.0, generator()), start) == 0.0


def test_noise_has_the_deviation_that_is_accounted_for() -> None:
    """Noise by tensor instead of by value, or of a deviation that does not follow the bound."""
    start = {"x": torch.zeros(200_000)}
    noised = privatise(start, start, clip_norm=3.0, noise_multiplier=0.5, generator=generator())
    assert float(noised["x"].std()) == pytest.approx(1.5, rel=0.02)
    assert float(noised["x"].mean()) == pytest.approx(0.0, abs=0.02)


def test_uploads_add_up_in_squares_and_outlive_the_process(tmp_path: Path) -> None:
    """A budget that a restart gives back."""
    assert Ledger(tmp_path).spend(2.0) == pytest.approx(0.5)
    assert Ledger(tmp_path).spend(1.0) == pytest.approx(math.sqrt(1.25))
    (tmp_path / LEDGER).write_text("{")
    with pytest.raises(DataError, match="damaged"):
        Ledger(tmp_path).spend(1.0)


def test_noise_without_a_bound_is_refused() -> None:
    """Noise that hides nothing, because what it hides has no bound."""
    with pytest.raises(msgspec.ValidationError, match="noise_multiplier needs clip_norm"):
        msgspec.convert({"noise_multiplier": 1.0}, Hyperparams)
