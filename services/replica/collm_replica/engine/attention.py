"""Attention of packed tokens over paged keys and values.

One call of the model runs T tokens of many sequences: first one token each of the decoding ones, then segments of
prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class KvCache:
    """Keys and values `[layers][blocks, block_tokens, kv_heads, head_dim]`, zero at first."""

    def __init__(
        self,
        layers: int,
        blocks: int,
        block_tokens: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (blocks, block_tokens, heads, head_dim)
        self.block_tokens = block_tokens
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `[T, kv_heads, head_dim]` at token places `[T]` (block * block_tokens + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, places, keys)
        self.values[layer].flatten(0, 1).index_copy_(0, places, values)

    def read(self, layer: int, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[n, kv_heads, blocks * block_tokens, head_dim]` of block tables `[n, blocks]`."""
        return _gather(self.keys[layer], tables), _gather(self.values[layer], tables)

    def scrub(self, blocks: Tensor) -> None:
        """Zero some blocks."""
        for layer in (*self.keys, *self.values):
            layer.index_fill_(0, blocks, 0)


def _gather(cache: Tensor, tables: Tensor) -> Tensor:
    _, block_tokens, heads, head_dim = cache.shape
    n, blocks = tables.shape
    rows = cache.flatten(1).index_select(0, tables.flatten())
    return rows.view(n, blocks * block_tokens, heads, head_dim).transpose(1, 2)


@dataclass
class Decodes:
    """The first n tokens of the pack: one of each decoding sequence.

    `tables` `[n, blocks]` are padded with the null block; `positions` `[n]` are the tokens' own.
    """

    tables: Tensor
    positions: Tensor
    block_tokens: int
    dtype: torch.dtype
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """Additive `[n, 1, 1, blocks * block_tokens]`: which keys each token sees; the same in all layers."""
        if window not in self._masks:
            places = torch.arange(self.tables.shape[1] * self.block_tokens, device=self.tables.device)
            self._masks[window] = _additive(_sees(self.positions, places, window), self.dtype)[:, None, None]
        return self._masks[window]


@dataclass
class Segment:
    """Tokens `[start, end)` of one sequence, at `[offset, offset + end - start)` of the pack.

    `table` `[1, blocks]` covers `end` tokens; it is None when everything the segment sees is in the pack.
    """

    offset: int
    start: int
    end: int
    table: Tensor | None
    device: torch.device
    dtype: torch.dtype
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def pack(self) -> slice:
        return slice(self.offset, self.offset + self.end - self.start)

    def causal(self, window: int | None) -> bool:
        """Whether the plain causal triangle is the mask."""
        return self.start == 0 and (window is None or self.end <= window)

    def mask(self, window: int | None) -> Tensor:
        """Additive `[end - start, end]`."""
        if window not in self._masks:
            places = torch.arange(self.end, device=self.device)
            self._masks[window] = _additive(_sees(places[self.start :], places, window), self.dtype)
        return self._masks[window]


def _sees(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    distance = queries[:, None] - keys[None]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def _additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, float("-inf"))


@dataclass(frozen=True)
class Prefill:
    """All segments at once: where their queries (in the pack) and their keys end, int32 `[segments + 1]` from 0.

    `places` are the token places of all keys, one segment's behind the other's.
    """

    query_ends: Tensor
    key_ends: Tensor
    longest_query: int
    longest_key: int
    places: Tensor


@dataclass
class Packed:
    """Where the tokens of one call belong. `places` `[T]` is where their keys go; no cache: nowhere.

    `prefill` says the same as `segments`, for kernels that take them all in one call.
    """

    cache: KvCache | None
    places: Tensor | None
    decodes: Decodes | None
    segments: list[Segment]
    prefill: Prefill | None = None

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Put keys and values `[T, kv_heads, head_dim]` where they belong."""
        if self.cache is not None and self.places is not None:
            self.cache.write(layer, self.places, key, value)


def attend(
    packed: Packed, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """Query `[T, heads, head_dim]`, key and value `[T, kv_heads, head_dim]`, already stored -> like query."""
    parts = []
    if packed.decodes is not None:
        parts.append(_decode(packed.cache, layer, query, packed.decodes, scale, window))
    parts += [_prefill(packed.cache, layer, query, key, value, one, scale, window) for one in packed.segments]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _prefill(
    cache: KvCache | None,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segment: Segment,
    scale: float,
    window: int | None,
) -> Tensor:
    q, k, v = (part[segment.pack].transpose(0, 1)[None] for part in (query, key, value))
    if segment.table is not None and cache is not None:
        k, v = (part[:, :, : segment.end] for part in cache.read(layer, segment.table))
    causal = segment.causal(window)
    mask = None if causal else segment.mask(window)
    gqa = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa)
    return out[0].transpose(0, 1)


def _decode(
    cache: KvCache | None, layer: int, query: Tensor, decodes: Decodes, scale: float, window: int | None
) -> Tensor:
    """All decoding sequences in one call: the query heads that share a key head are its queries."""
    assert cache is not None
    keys, values = cache.read(layer, decodes.tables)
    n, kv_heads, _, head_dim = keys.shape
    rows = query[:n].reshape(n, kv_heads, -1, head_dim)
    out = scaled_dot_product_attention(rows, keys, values, attn_mask=decodes.mask(window), scale=scale)
    return out.reshape(n, -1, head_dim)
