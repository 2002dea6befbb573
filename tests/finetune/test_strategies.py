"""The server's optimisers against their papers' equations, written out here for one number at a time."""

from __future__ import annotations

import pytest
import torch

from collm_common.messages import ServerRates
from collm_replica.finetune.screening import Update
from collm_replica.finetune.strategies import MAX_STEP_RATIO, STRATEGIES, Combined, coefficients
from tests.finetune.adapters import adapter, update

NAME = "l0.q_proj.lora_A.weight"
RATES = ServerRates(learning_rate=0.5, momentum=0.8, beta2=0.9, tau=0.1)


def two_rounds(strategy: str, rates: ServerRates) -> tuple[list[torch.Tensor], list[torch.Tensor], Combined]:
    """(x, delta) of two rounds that follow each other, and the end."""
    x, state, places, deltas = adapter(0), {}, [], []  # type: ignore[var-annotated]
    for number in range(2):
        updates = [update(2 * number + 1), update(2 * number + 2)]
        places.append(x[NAME])
        deltas.append((updates[0].tensors[NAME] + updates[1].tensors[NAME]) / 2 - x[NAME])
        made = STRATEGIES[strategy](x, updates, 4, rates, state)  # type: ignore[index]
        x, state = made.tensors, made.state
    return places, deltas, made


def test_momentum_carries_over_rounds() -> None:
    """A server that forgets, or that adds momentum on top of an averaged step."""
    places, deltas, made = two_rounds("fedavgm", RATES)
    first = deltas[0]
    second = 0.8 * first + deltas[1]
    assert torch.allclose(places[1], places[0] + 0.5 * first, atol=1e-5)
    assert torch.allclose(made.tensors[NAME], places[1] + 0.5 * second, atol=1e-5)


def test_adam_carries_both_moments_over_rounds() -> None:
    """Second moments of the adapter instead of its change, or tau under the root."""
    places, deltas, made = two_rounds("fedadam", RATES)
    m = torch.zeros_like(deltas[0])
    v = torch.zeros_like(m)
    ends = []
    for place, delta in zip(places, deltas, strict=True):
        m, v = 0.8 * m + (1 - 0.8) * delta, 0.9 * v + (1 - 0.9) * delta**2
        ends.append(place + 0.5 * m / (v.sqrt() + 0.1))
    assert torch.allclose(places[1], ends[0], atol=1e-5)
    assert torch.allclose(made.tensors[NAME], ends[1], atol=1e-5)


def test_momentum_without_memory_is_plain_averaging() -> None:
    """A default rate that makes one strategy worse than the one it extends."""
    updates = [update(1, samples=3), update(2)]
    plain = STRATEGIES["fedavg"](adapter(0), updates, 4, ServerRates(), {})
    same = STRATEGIES["fedavgm"](adapter(0), updates, 4, ServerRates(momentum=0.0), {})
    assert all(torch.allclose(tensor, same.tensors[name], atol=1e-6) for name, tensor in plain.tensors.items())


def clients(*counts: tuple[int, int]) -> list[Update]:
    return [update(n, samples=samples, steps=steps) for n, (samples, steps) in enumerate(counts)]


def test_equal_steps_are_weighted_by_samples_alone() -> None:
    """A large client that counts as much as a small one."""
    assert coefficients(clients((10, 5), (30, 5))) == pytest.approx([0.25, 0.75])


def test_fewer_steps_are_evened_out_within_a_bound() -> None:
    """A straggler that is drowned, or a single noisy step that is blown up fifty times."""
    assert coefficients(clients((8, 2), (16, 4))) == pytest.approx([5 / 9, 5 / 9])
    one, many = coefficients(clients((1, 1), (99, 99)))
    assert one == pytest.approx(0.01 * MAX_STEP_RATIO)
    assert many == pytest.approx(0.99 * 98.02 / 99, rel=1e-3)
