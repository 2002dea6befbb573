"""From the clients' adapters to one: factor averages, or the exact mean product projected back to the rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec import Struct

from collm_common.errors import AdapterError
from collm_replica.finetune.lora import fresh_a

Tensors = Mapping[str, torch.Tensor]
Factors = tuple[torch.Tensor, torch.Tensor]
A, B = ".lora_A.", ".lora_B."
NEGLIGIBLE = 1e-6


class Aggregate(Struct, frozen=True):
    """`residual`: how far the result's products are from the mean product, relative Frobenius norm over all layers."""

    tensors: dict[str, torch.Tensor]
    residual: float


def aggregate(strategy: str, updates: Sequence[tuple[Tensors, int]], rank: int) -> Aggregate:
    """Combine (tensors, samples) of all clients, weighted by samples. Raises AdapterError.

    fedavg   A = sum n_k/n A_k, B = sum n_k/n B_k; equal ranks (paper section 4)
    product  the rank-`rank` projection of sum n_k/n B_k A_k; any ranks

    The scale alpha / rank is not in the factors: it must be one for all clients and for the result.
    """
    if strategy not in STRATEGIES:
        raise AdapterError(f"strategy {strategy!r} is unknown; there are {', '.join(STRATEGIES)}")
    layers = _layers(updates)
    total = sum(samples for _, samples in updates)
    shares = [samples / total for _, samples in updates]
    result: dict[str, torch.Tensor] = {}
    lost = norm = 0.0
    for layer in layers:
        name_a, name_b = f"{layer}{A}weight", f"{layer}{B}weight"
        factors = [(tensors[name_a].float(), tensors[name_b].float()) for tensors, _ in updates]
        _check_shapes(layer, factors)
        left, right = _stack(factors, shares)
        a, b = STRATEGIES[strategy](factors, shares, rank)
        result[name_a], result[name_b] = a, b
        norm += _square(left, right)
        lost += _square(torch.cat([left, -b], 1), torch.cat([right, a], 0))
    return Aggregate(result, (max(0.0, lost) / norm) ** 0.5 if norm > 0 else 0.0)


def average(factors: Sequence[Factors], shares: Sequence[float], rank: int) -> Factors:
    """Mean of A [r, in] and mean of B [out, r] apart; off from the mean product by their covariance across clients."""
    if (ranks := {a.shape[0] for a, _ in factors}) != {rank}:
        raise AdapterError(f"fedavg needs equal ranks of {rank}, got {sorted(ranks)}; use product")
    a = sum(share * factor[0] for share, factor in zip(shares, factors, strict=True))
    b = sum(share * factor[1] for share, factor in zip(shares, factors, strict=True))
    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    return a, b


def project(factors: Sequence[Factors], shares: Sequence[float], rank: int) -> Factors:
    """Best rank-`rank` A [r, in], B [out, r] of the mean product, by QR of the stacked factors and a small SVD.

    Directions that the product does not use are given as at a fresh start, B zero and A random: were both zero,
    neither would ever get a gradient again.
    """
    left, right = _stack(factors, shares)
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T)
    used = min(rank, int((s > NEGLIGIBLE * s.max()).sum()))
    root = s[:used].sqrt()
    b = q_left @ (u[:, :used] * root)
    a = (root[:, None] * vh[:used]) @ q_right.T
    fresh = fresh_a(rank - used, a.shape[1], torch.Generator().manual_seed(rank))
    return torch.cat([a, fresh]), torch.cat([b, b.new_zeros(b.shape[0], rank - used)], 1)


def _layers(updates: Sequence[tuple[Tensors, int]]) -> list[str]:
    """What the updates adapt. Raises AdapterError unless all have the same layers, each with both factors."""
    if not updates:
        raise AdapterError("no updates to aggregate")
    names = set(updates[0][0])
    for tensors, samples in updates:
        if set(tensors) != names:
            raise AdapterError(f"updates have different tensors, such as {min(set(tensors) ^ names)}")
        if samples < 1:
            raise AdapterError(f"an update of {samples} samples: must be at least 1")
    layers = sorted({name.split(".lora_")[0] for name in names})
    if odd := names ^ {f"{layer}{factor}weight" for layer in layers for factor in (A, B)}:
        raise AdapterError(f"{min(odd)} is missing, or no factor of a LoRA layer")
    return layers


def _check_shapes(layer: str, factors: Sequence[Factors]) -> None:
    shapes = [(tuple(a.shape), tuple(b.shape)) for a, b in factors]
    columns, rows = factors[0][0].shape[-1], factors[0][1].shape[0]
    for a, b in factors:
        if a.shape != (b.shape[-1], columns) or b.shape != (rows, a.shape[0]):
            raise AdapterError(f"{layer}: shapes of A and B do not fit each other or the other clients': {shapes}")


def _stack(factors: Sequence[Factors], shares: Sequence[float]) -> Factors:
    """left [out, R] and right [R, in] with left @ right = sum of share * B_k A_k; R is the sum of the ranks."""
    left = torch.cat([share * b for share, (_, b) in zip(shares, factors, strict=True)], 1)
    return left, torch.cat([a for a, _ in factors], 0)


def _square(left: torch.Tensor, right: torch.Tensor) -> float:
    """|left @ right|_F^2 without the product: the trace of two small Gram matrices."""
    left, right = left.double(), right.double()
    return float(((left.T @ left) * (right @ right.T)).sum())


STRATEGIES: dict[str, Callable[[Sequence[Factors], Sequence[float], int], Factors]] = {
    "fedavg": average,
    "product": project,
}
