"""From the clients' adapters to one: factor averages, or the exact mean product projected back to the rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from collm_common.errors import AdapterError
from msgspec import Struct

Tensors = Mapping[str, torch.Tensor]
A, B = ".lora_A.", ".lora_B."


class Aggregate(Struct, frozen=True):
    """`residual`: how far the result's products are from the mean product, relative Frobenius norm over all layers."""

    tensors: dict[str, torch.Tensor]
    residual: float


def aggregate(strategy: str, updates: Sequence[tuple[Tensors, int]], rank: int) -> Aggregate:
    """Combine (tensors, samples) of all clients, weighted by samples. Raises AdapterError.

    fedavg   A = sum n_k/n A_k, B = sum n_k/n B_k; equal ranks (paper section 4)
    product  the rank-`rank` projection of sum n_k/n B_k A_k; any ranks
    """
    if strategy not in STRATEGIES:
        raise AdapterError(f"strategy {strategy!r} is unknown; there are {', '.join(STRATEGIES)}")
    if not updates:
        raise AdapterError("no updates to aggregate")
    names = set(updates[0][0])
    for tensors, samples in updates:
        if set(tensors) != names:
            raise AdapterError(f"updates have different tensors, such as {min(set(tensors) ^ names)}")
        if samples < 1:
            raise AdapterError(f"an update of {samples} samples: must be at least 1")
    total = sum(samples for _, samples in updates)
    shares = [samples / total for _, samples in updates]
    result: dict[str, torch.Tensor] = {}
    lost = norm = 0.0
    for name in sorted(name for name in names if A in name):
        factors = [(tensors[name].float(), tensors[name.replace(A, B)].float()) for tensors, _ in updates]
        left, right = _stack(factors, shares)
        a, b = STRATEGIES[strategy](factors, shares, rank)
        result[name], result[name.replace(A, B)] = a, b
        norm += _square(left, right)
        lost += _square(torch.cat([left, -b], 1), torch.cat([right, a], 0))
    return Aggregate(result, (max(0.0, lost) / norm) ** 0.5 if norm > 0 else 0.0)


def average(
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]], shares: Sequence[float], rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of A [r, in] and mean of B [out, r] apart; off from the mean product by their covariance across clients."""
    if len({a.shape for a, _ in factors}) > 1:
        raise AdapterError(f"fedavg needs equal ranks, got {sorted({a.shape[0] for a, _ in factors})}; use product")
    a = sum(share * factor[0] for share, factor in zip(shares, factors, strict=True))
    b = sum(share * factor[1] for share, factor in zip(shares, factors, strict=True))
    assert isinstance(a, torch.Tensor)
    assert isinstance(b, torch.Tensor)
    return a, b


def project(
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]], shares: Sequence[float], rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Best rank-`rank` A [r, in], B [out, r] of the mean product, by QR of the stacked factors and a small SVD."""
    left, right = _stack(factors, shares)
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T)
    root = s[:rank].sqrt()
    b = q_left @ (u[:, :rank] * root)
    a = (root[:, None] * vh[:rank]) @ q_right.T
    short = rank - a.shape[0]
    if short > 0:
        a = torch.cat([a, a.new_zeros(short, a.shape[1])])
        b = torch.cat([b, b.new_zeros(b.shape[0], short)], 1)
    return a.contiguous(), b.contiguous()


def _stack(
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]], shares: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """left [out, R] and right [R, in] with left @ right = sum of share * B_k A_k; R is the sum of the ranks."""
    left = torch.cat([share * b for share, (_, b) in zip(shares, factors, strict=True)], 1)
    return left, torch.cat([a for a, _ in factors], 0)


def _square(left: torch.Tensor, right: torch.Tensor) -> float:
    """|left @ right|_F^2 without the product: the trace of two small Gram matrices."""
    left, right = left.double(), right.double()
    return float(((left.T @ left) * (right @ right.T)).sum())


STRATEGIES: dict[
    str,
    Callable[[Sequence[tuple[torch.Tensor, torch.Tensor]], Sequence[float], int], tuple[torch.Tensor, torch.Tensor]],
] = {"fedavg": average, "product": project}
