"""Aggregation against the full matrices that it never forms."""

from __future__ import annotations

import pytest
import torch

from collm_common.errors import AdapterError
from collm_replica.finetune.aggregation import aggregate

LAYERS = {"l0.q_proj": (24, 16), "l1.down_proj": (10, 30)}


def client(seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, (rows, columns) in LAYERS.items():
        tensors[f"{layer}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        tensors[f"{layer}.lora_B.weight"] = torch.randn(rows, rank, generator=generator)
    return tensors


def products(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {layer: tensors[f"{layer}.lora_B.weight"] @ tensors[f"{layer}.lora_A.weight"] for layer in LAYERS}


def mean_product(updates: list[tuple[dict[str, torch.Tensor], int]]) -> dict[str, torch.Tensor]:
    total = sum(samples for _, samples in updates)
    return {
        layer: torch.stack([products(tensors)[layer] * samples / total for tensors, samples in updates]).sum(0)
        for layer in LAYERS
    }


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def transposed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.T for name, tensor in tensors.items()}


@pytest.mark.parametrize("ranks", [(4, 4, 4), (2, 4, 8)])
def test_the_product_is_the_mean_of_b_a_projected_to_the_rank(ranks: tuple[int, ...]) -> None:
    """A transposed update, ranks that must be equal, or weights by client instead of by sample."""
    updates = [(client(seed, rank), 10 * (seed + 1)) for seed, rank in enumerate(ranks)]
    result = aggregate("product", updates, rank=4)
    lost = norm = 0.0
    for layer, exact in mean_product(updates).items():
        u, s, vh = torch.linalg.svd(exact, full_matrices=False)
        projected = u[:, :4] @ torch.diag(s[:4]) @ vh[:4]
        assert torch.allclose(products(result.tensors)[layer], projected, atol=1e-4)
        assert result.tensors[f"{layer}.lora_A.weight"].shape == (4, LAYERS[layer][1])
        lost, norm = lost + float(s[4:].pow(2).sum()), norm + float(s.pow(2).sum())
    assert result.residual == pytest.approx((lost / norm) ** 0.5, abs=1e-3)


@pytest.mark.parametrize("strategy", ["fedavg", "product"])
def test_clients_that_agree_change_nothing(strategy: str) -> None:
    """An aggregation that shrinks or rotates what all clients have in common."""
    result = aggregate(strategy, [(client(1), 3), (client(1), 5)], rank=4)
    for layer, expected in products(client(1)).items():
        assert torch.allclose(products(result.tensors)[layer], expected, atol=1e-4)
    assert result.residual < 1e-3


def test_fedavg_averages_factors_and_reports_how_far_that_is_from_the_products() -> None:
    """A residual that hides the covariance of A and B across clients."""
    updates = [(client(1), 1), (client(2), 3)]
    result = aggregate("fedavg", updates, rank=4)
    for name in client(1):
        assert torch.allclose(result.tensors[name], client(1)[name] / 4 + client(2)[name] * 3 / 4)
    exact, averaged = mean_product(updates), products(result.tensors)
    lost = sum(float((exact[layer] - averaged[layer]).pow(2).sum()) for layer in LAYERS)
    norm = sum(float(exact[layer].pow(2).sum()) for layer in LAYERS)
    assert result.residual == pytest.approx((lost / norm) ** 0.5, rel=1e-4)


def test_a_low_rank_mean_fills_the_rank_with_directions_that_can_be_learnt() -> None:
    """Shapes that differ from what the clients train, or factors that are both zero and stay so for ever."""
    silent = {name: tensor * (".lora_A." in name) for name, tensor in client(2).items()}
    for update, used in ((client(1, rank=2), 2), (silent, 0)):
        result = aggregate("product", [(update, 1)], rank=4)
        for layer, expected in products(update).items():
            a, b = result.tensors[f"{layer}.lora_A.weight"], result.tensors[f"{layer}.lora_B.weight"]
            assert (a.shape[0], b.shape[1]) == (4, 4)
            assert int((b.norm(dim=0) > 0).sum()) == used
            assert bool((a.norm(dim=1) > 0).all())
            assert torch.allclose(b @ a, expected, atol=1e-4)
        assert result.residual < 1e-3


def test_updates_are_left_as_they_are() -> None:
    """An average that is summed into the first client's tensors."""
    updates = [(client(1), 1), (client(2), 3)]
    for strategy in ("fedavg", "product"):
        aggregate(strategy, updates, rank=4)
        for seed, (tensors, _) in enumerate(updates, 1):
            assert all(torch.equal(tensor, tensors[name]) for name, tensor in client(seed).items())


@pytest.mark.parametrize(
    ("strategy", "updates", "why"),
    [
        ("median", [(client(1), 1)], "median.*fedavg, product"),
        ("fedavg", [], "no updates"),
        ("fedavg", [(client(1), 1), ({}, 1)], "different tensors"),
        ("fedavg", [(client(1), 0)], "at least 1"),
        ("fedavg", [(client(1), 1), (client(1, rank=2), 1)], "equal ranks"),
        ("fedavg", [(client(1, rank=2), 1)], "equal ranks of 4"),
        ("product", [(without(client(1), "l0.q_proj.lora_B.weight"), 1)], "l0.q_proj.lora_B.weight is missing"),
        ("product", [(client(1), 1), (transposed(client(1)), 1)], "l0.q_proj: shapes"),
    ],
)
def test_what_cannot_be_combined_is_refused(
    strategy: str, updates: list[tuple[dict[str, torch.Tensor], int]], why: str
) -> None:
    """A round that ends in a foreign exception."""
    with pytest.raises(AdapterError, match=why):
        aggregate(strategy, updates, rank=4)
