"""The arithmetic of one block. `Operators` is the reference, in plain torch, for any device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from collm_replica.engine.attention import Packed, attend
from collm_replica.engine.groups import Group, Selection, project


@dataclass(frozen=True)
class Norm:
    """Root mean square normalisation over the last dimension."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """From a Hugging Face RMSNorm."""
        return cls(module.weight, module.variance_epsilon)


@dataclass(frozen=True)
class Layer:
    """One block: what it multiplies with, and how it attends."""

    index: int
    norm: Norm
    qkv: Group
    q_norm: Norm | None
    k_norm: Norm | None
    out: Group
    mlp_norm: Norm
    gate_up: Group
    down: Group
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None


@dataclass(frozen=True)
class Inputs:
    """One call: tokens `ids` and `positions` `[T]`, the places `keep` whose logits are wanted (None: all)."""

    ids: Tensor
    positions: Tensor
    keep: Tensor | None
    selection: Selection | None
    packed: Packed


class Operators:
    """Tokens come first in every tensor."""

    def normalise(self, x: Tensor, norm: Norm) -> Tensor:
        """`[..., d]` -> the same shape."""
        return rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def attention(self, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor, inputs: Inputs) -> Tensor:
        """Hidden `[T, d]`, rotary `[T, head_dim]` -> `[T, heads * head_dim]`; keys and values are stored."""
        y = project(layer.qkv, h, inputs.selection).view(len(h), -1, layer.head_dim)
        turned, value = torch.split(y, [layer.heads + layer.kv_heads, layer.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = torch.split(turned, [layer.heads, layer.kv_heads], dim=1)
            turned = torch.cat((self.normalise(query, layer.q_norm), self.normalise(key, layer.k_norm)), dim=1)
        query, key = torch.split(rotate(turned, cos, sin), [layer.heads, layer.kv_heads], dim=1)
        inputs.packed.store(layer.index, key, value)
        return attend(inputs.packed, layer.index, query, key, value, layer.scale, layer.window).flatten(1)

    def add(self, group: Group, y: Tensor, x: Tensor, norm: Norm, selection: Selection | None) -> tuple[Tensor, Tensor]:
        """(x plus the projection of y, the same normalised)."""
        x = x + project(group, y, selection)
        return x, self.normalise(x, norm)

    def gated(self, group: Group, h: Tensor, selection: Selection | None) -> Tensor:
        """SiLU(gate) times up."""
        gate, up = project(group, h, selection).chunk(2, dim=1)
        return silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021) of `[T, heads, head_dim]` by `[T, head_dim]`, halves as pairs."""
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    turned = (low * cos[..., :half] - high * sin[..., :half], high * cos[..., half:] + low * sin[..., half:])
    return torch.cat(turned, dim=-1)
