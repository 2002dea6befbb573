"""Sums of low-rank products B A, never multiplied out: their norms, and their best approximation at a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from collm_replica.finetune.lora import fresh_a

Tensors = Mapping[str, torch.Tensor]
Factors = tuple[torch.Tensor, torch.Tensor]
"""A [r, in] and B [out, r]."""
Terms = Sequence[tuple[float, Factors]]
"""The sum of share * B A over all terms."""

A, B = ".lora_A.weight", ".lora_B.weight"
NEGLIGIBLE = 1e-6


def layers(tensors: Tensors) -> list[str]:
    """Names of the adapted layers, in order."""
    return sorted({name.split(".lora_")[0] for name in tensors})


def factors(tensors: Tensors, layer: str) -> Factors:
    """A and B of one layer, in float32."""
    return tensors[layer + A].float(), tensors[layer + B].float()


def rank(tensors: Tensors) -> int:
    """The largest rank of any layer; 0 without one."""
    return max((tensor.shape[0] for name, tensor in tensors.items() if name.endswith(A)), default=0)


def stack(terms: Terms) -> Factors:
    """left [out, R] and right [R, in] whose product is the sum; R is the sum of the ranks."""
    return torch.cat([share * b for share, (_, b) in terms], 1), torch.cat([a for _, (a, _) in terms], 0)


def square(terms: Terms) -> float:
    """|sum|_F^2: the trace of the product of two small Gram matrices."""
    left, right = (factor.double() for factor in stack(terms))
    return max(0.0, float(((left.T @ left) * (right @ right.T)).sum()))


def project(terms: Terms, to_rank: int) -> Factors:
    """Best A [r, in] and B [out, r] of the sum, by QR of the stacked factors and a small SVD.

    Directions that the sum does not use are given as at a fresh start, B zero and A random: were both zero, neither
    would ever get a gradient again.
    """
    left, right = stack(terms)
    q_left, r_left = torch.linalg.qr(left)
    q_right, r_right = torch.linalg.qr(right.T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T)
    used = min(to_rank, int((s > NEGLIGIBLE * s.max()).sum()))
    root = s[:used].sqrt()
    b = q_left @ (u[:, :used] * root)
    a = (root[:, None] * vh[:used]) @ q_right.T
    fresh = fresh_a(to_rank - used, a.shape[1], torch.Generator().manual_seed(to_rank))
    return torch.cat([a, fresh]), torch.cat([b, b.new_zeros(b.shape[0], to_rank - used)], 1)


def at_rank(tensors: Tensors, to_rank: int) -> dict[str, torch.Tensor]:
    """The same adapter at another rank: as it is where it fits, else its best approximation."""
    result: dict[str, torch.Tensor] = {}
    for layer in layers(tensors):
        a, b = factors(tensors, layer)
        result[layer + A], result[layer + B] = (a, b) if a.shape[0] == to_rank else project([(1.0, (a, b))], to_rank)
    return result
