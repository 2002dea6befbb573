"""The operators of a GPU: Triton between the matrix products, flash attention for prompts, pages read in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from collm_replica.engine import kernels
from collm_replica.engine.attention import Decodes, KvCache, Prefill
from collm_replica.engine.groups import Group, Selection
from collm_replica.engine.operators import Inputs, Layer, Norm, Operators

TILE = 64
"""Keys that one step of a paged decode looks at."""

HEAD_DIMS = (32, 64, 128, 256)


class FusedOperators(Operators):
    """What it returns is its own memory: a captured graph may hold on to it."""

    def __init__(self, processors: int) -> None:
        """`processors`: how many programs the device runs at once, at the least."""
        self._processors = processors

    @staticmethod
    def serves(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the kernels can be used at all."""
        return device.type == "cuda" and head_dim in HEAD_DIMS and dtype in (torch.bfloat16, torch.float16)

    def normalise(self, x: Tensor, norm: Norm) -> Tensor:
        return self._add_norm(x, None, norm)[1]

    def attention(self, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor, inputs: Inputs) -> Tensor:
        packed = inputs.packed
        if packed.cache is None or packed.places is None:
            return super().attention(layer, h, cos, sin, inputs)
        query = self._heads(layer, h, cos, sin, inputs.selection, packed.cache, packed.places)
        out = torch.empty_like(query)
        count = 0
        if packed.decodes is not None:
            count = len(packed.decodes.positions)
            self._decode(layer, query[:count], packed.cache, packed.decodes, out[:count])
        if packed.prefill is not None:
            out[count:] = _flash(layer, query[count:], packed.cache, packed.prefill)
        return out.flatten(1)

    def add(self, group: Group, y: Tensor, x: Tensor, norm: Norm, selection: Selection | None) -> tuple[Tensor, Tensor]:
        y, low = _products(group, y, selection)
        if low is None or selection is None:
            return self._add_norm(x, y, norm)
        total, tile = torch.empty_like(x), _tile(len(x))
        grid = (_blocks(len(x), tile), _blocks(x.shape[1], 64))
        kernels.add_lora[grid](
            x, y, y.stride(0), low, low.stride(0), group.b, selection.slots, total, len(x), OUT=x.shape[1],
            **_lora(group), BT=tile, BN=64, num_warps=4,
        )  # fmt: skip
        return self._add_norm(total, None, norm)

    def gated(self, group: Group, h: Tensor, selection: Selection | None) -> Tensor:
        y, low = _products(group, h, selection)
        half = group.splits[0]
        z = y.new_empty(len(y), half)
        tile, width = (_tile(len(y)), 64) if low is not None else (1, 1024)
        operand = y if low is None else low
        slots = y if selection is None else selection.slots
        kernels.gated[_blocks(len(y), tile), _blocks(half, width)](
            y, y.stride(0), operand, operand.stride(0), group.b, slots, z, len(y), HALF=half, LORA=low is not None,
            **_lora(group), BT=tile, BN=width, num_warps=4,
        )  # fmt: skip
        return z

    def _add_norm(self, x: Tensor, y: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        width = x.shape[-1]
        total = x if y is None else torch.empty_like(x)
        h = torch.empty_like(x)
        other = x if y is None else y
        kernels.add_norm[x.numel() // width,](
            x, other, other.stride(0), norm.weight, total, h, norm.eps, D=width, ADD=y is not None,
            BLOCK=kernels.power_of_two(width), num_warps=8 if width >= 2048 else 4,
        )  # fmt: skip
        return total, h

    def _heads(
        self, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor, selection: Selection | None, cache: KvCache, to: Tensor
    ) -> Tensor:
        y, low = _products(layer.qkv, h, selection)
        query = y.new_empty(len(y), layer.heads, layer.head_dim)
        norms = layer.q_norm is not None and layer.k_norm is not None
        weights = [norm.weight if norm is not None else y for norm in (layer.q_norm, layer.k_norm)]
        tile = _tile(len(y)) if low is not None else min(16, kernels.power_of_two(len(y)))
        operand = y if low is None else low
        slots = to if selection is None else selection.slots
        kernels.heads[_blocks(len(y), tile), layer.heads + 2 * layer.kv_heads](
            y, y.stride(0), operand, operand.stride(0), layer.qkv.b, slots, cos, sin, to, *weights, query,
            cache.keys[layer.index], cache.values[layer.index], len(y), layer.q_norm.eps if layer.q_norm else 0.0,
            H=layer.heads, KV=layer.kv_heads, D=layer.head_dim, NORM=norms, LORA=low is not None,
            **_lora(layer.qkv), BT=tile, num_warps=4,
        )  # fmt: skip
        return query

    def _decode(self, layer: Layer, query: Tensor, cache: KvCache, decodes: Decodes, out: Tensor) -> None:
        count, heads, size = query.shape
        splits = self._splits(count * layer.kv_heads)
        part = query.new_empty(count, heads, splits, size, dtype=torch.float32) if splits > 1 else query
        stat = query.new_empty(count, heads, splits, 2, dtype=torch.float32) if splits > 1 else query
        tables = decodes.tables
        kernels.paged_decode[count, layer.kv_heads, splits](
            query, cache.keys[layer.index], cache.values[layer.index], tables, tables.stride(0), decodes.positions,
            out, part, stat, layer.scale, H=heads, KV=layer.kv_heads, D=size, BLOCK=cache.block_tokens,
            WINDOW=layer.window or 0, SPLITS=splits, G=kernels.power_of_two(heads // layer.kv_heads), BN=TILE,
            num_warps=2, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            kernels.combine[count * heads,](part, stat, out, D=size, SPLITS=splits, num_warps=2)

    def _splits(self, programs: int) -> int:
        """A power of two that gives each multiprocessor about two programs."""
        splits = 1
        while programs * splits * 2 <= self._processors * 2 and splits < 32:
            splits *= 2
        return splits


def _products(group: Group, x: Tensor, selection: Selection | None) -> tuple[Tensor, Tensor | None]:
    """(x by the weights, x by the A of all slots), in one product where they lie together."""
    if selection is None:
        return linear(x, group.weight, group.bias), None
    if group.wide is None:
        return linear(x, group.weight, group.bias), linear(x, group.a.flatten(0, 2))
    both = linear(x, group.wide, group.wide_bias)
    out = len(group.weight)
    return both[:, :out], both[:, out:]


def _flash(layer: Layer, query: Tensor, cache: KvCache, prefill: Prefill) -> Tensor:
    key, value = (
        pages[layer.index].flatten(0, 1).index_select(0, prefill.places) for pages in (cache.keys, cache.values)
    )
    attend: Any = torch.ops.aten._flash_attention_forward
    out: Tensor = attend(
        query, key, value, prefill.query_ends, prefill.key_ends, prefill.longest_query, prefill.longest_key, 0.0,
        True, False, scale=layer.scale,
        window_size_left=-1 if layer.window is None else layer.window - 1, window_size_right=0,
    )[0]  # fmt: skip
    return out


def _lora(group: Group) -> dict[str, int]:
    rows = max(1, group.slots * group.max_rank)
    return {"RANK": group.max_rank, "SR": rows, "K": kernels.power_of_two(rows)}


def _tile(tokens: int) -> int:
    return 16 if tokens <= 64 else 64


def _blocks(count: int, size: int) -> int:
    return -(-count // size)
