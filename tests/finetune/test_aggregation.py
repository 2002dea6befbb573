"""Aggregation against the full matrices that it never forms."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from collm_common.errors import AdapterError
from collm_common.types import Strategy
from collm_replica.finetune.aggregation import Aggregate, Plan, aggregate
from collm_replica.finetune.screening import Update
from tests.finetune.adapters import LAYERS, adapter, fresh, products, update


def combined(
    strategy: Strategy, updates: Sequence[Update], rank: int = 4, start: dict[str, torch.Tensor] | None = None
) -> Aggregate:
    return aggregate(Plan(strategy, rank, 2.0, 9), start or fresh(rank), updates, {}, {})


def mean_product(updates: Sequence[Update]) -> dict[str, torch.Tensor]:
    total = sum(one.samples for one in updates)
    return {
        layer: torch.stack([products(one.tensors)[layer] * one.samples / total for one in updates]).sum(0)
        for layer in LAYERS
    }


@pytest.mark.parametrize("ranks", [(4, 4, 4), (2, 4, 3)])
def test_the_product_is_the_mean_of_b_a_projected_to_the_rank(ranks: tuple[int, ...]) -> None:
    """A transposed update, ranks that must be equal, or weights by client instead of by sample."""
    updates = [update(seed, rank, samples=10 * (seed + 1)) for seed, rank in enumerate(ranks)]
    result = combined("product", updates)
    lost = norm = 0.0
    for layer, exact in mean_product(updates).items():
        u, s, vh = torch.linalg.svd(exact, full_matrices=False)
        projected = u[:, :4] @ torch.diag(s[:4]) @ vh[:4]
        assert torch.allclose(products(result.tensors)[layer], projected, atol=1e-4)
        assert result.tensors[f"{layer}.lora_A.weight"].shape == (4, LAYERS[layer][1])
        lost, norm = lost + float(s[4:].pow(2).sum()), norm + float(s.pow(2).sum())
    assert result.residual == pytest.approx((lost / norm) ** 0.5, abs=1e-3)


@pytest.mark.parametrize("strategy", ["fedavg", "product"])
def test_clients_that_agree_change_nothing(strategy: Strategy) -> None:
    """An aggregation that shrinks or rotates what all clients have in common."""
    result = combined(strategy, [update(1, samples=3, client="a"), update(1, samples=5, client="b")])
    for layer, expected in products(adapter(1)).items():
        assert torch.allclose(products(result.tensors)[layer], expected, atol=1e-4)
    assert result.residual < 1e-3


def test_fedavg_averages_factors_and_reports_how_far_that_is_from_the_products() -> None:
    """A residual that hides the covariance of A and B across clients."""
    updates = [update(1, samples=1), update(2, samples=3)]
    result = combined("fedavg", updates)
    for name in adapter(1):
        assert torch.allclose(result.tensors[name], adapter(1)[name] / 4 + adapter(2)[name] * 3 / 4, atol=1e-6)
    exact, averaged = mean_product(updates), products(result.tensors)
    lost = sum(float((exact[layer] - averaged[layer]).pow(2).sum()) for layer in LAYERS)
    norm = sum(float(exact[layer].pow(2).sum()) for layer in LAYERS)
    assert result.residual == pytest.approx((lost / norm) ** 0.5, rel=1e-4)


def test_a_low_rank_mean_fills_the_rank_with_directions_that_can_be_learnt() -> None:
    """Shapes that differ from what the clients train, or factors that are both zero and stay so for ever."""
    for one, used in ((update(2, rank=2), 2), (Update("c", fresh(4), 1, 1, 2.0), 0)):
        result = combined("product", [one])
        for layer, expected in products(one.tensors).items():
            a, b = result.tensors[f"{layer}.lora_A.weight"], result.tensors[f"{layer}.lora_B.weight"]
            assert (a.shape[0], b.shape[1]) == (4, 4)
            assert int((b.norm(dim=0) > 0).sum()) == used
            assert bool((a.norm(dim=1) > 0).all())
            assert torch.allclose(b @ a, expected, atol=1e-4)
        assert result.residual < 1e-3


@pytest.mark.parametrize("strategy", ["fedavg", "fedavgm", "fedadam", "product"])
def test_updates_are_left_as_they_are(strategy: Strategy) -> None:
    """An average that is summed into the first client's tensors."""
    updates = [update(1, samples=1), update(2, samples=3)]
    combined(strategy, updates)
    for seed, one in enumerate(updates, 1):
        assert all(torch.equal(tensor, one.tensors[name]) for name, tensor in adapter(seed).items())


@pytest.mark.parametrize("strategy", ["fedavg", "product"])
def test_a_client_with_fewer_steps_counts_by_its_change_a_step(strategy: Strategy) -> None:
    """A straggler whose part in the mean falls with the square of its steps, or a start that counts for nothing."""
    start = adapter(9)
    slow, fast = update(1, samples=10, steps=2), update(2, samples=30, steps=6)
    result = combined(strategy, [slow, fast], rank=4, start=start)
    counted = (0.25 * 5 / 2, 0.75 * 5 / 6)
    if strategy == "fedavg":
        for name, old in start.items():
            change = counted[0] * (slow.tensors[name] - old) + counted[1] * (fast.tensors[name] - old)
            assert torch.allclose(result.tensors[name], old + change, atol=1e-4)
        return
    for layer in LAYERS:
        base = products(start)[layer]
        changes = (products(one.tensors)[layer] - base for one in (slow, fast))
        exact = base + sum((c * change for c, change in zip(counted, changes, strict=True)), torch.zeros_like(base))
        u, s, vh = torch.linalg.svd(exact, full_matrices=False)
        projected = u[:, :4] @ torch.diag(s[:4]) @ vh[:4]
        assert torch.allclose(products(result.tensors)[layer], projected, atol=1e-3)


def test_nothing_to_combine_is_an_error_that_names_everyone() -> None:
    """A round that ends in a foreign exception, or a client that must be guessed."""
    with pytest.raises(AdapterError, match="there is none"):
        combined("fedavg", [])
    with pytest.raises(AdapterError, match=r"c1: l0\.q_proj has rank 8.*r9: gone"):
        aggregate(Plan("fedavg", 4, 2.0, 9), fresh(4), [update(1, rank=8)], {}, {"r9": "gone"})
