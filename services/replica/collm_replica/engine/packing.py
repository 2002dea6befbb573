"""Chunks of many sequences -> the tensors of one call of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from collm_replica.engine.attention import Decodes, KvCache, Packed, Segment
from collm_replica.engine.kv import NULL_BLOCK
from collm_replica.engine.sequence import Chunk


@dataclass
class Pack:
    """`ids` and `positions` `[1, T]`, `keep` the places in the pack whose logits are read, `slots` one a token."""

    ids: Tensor
    positions: Tensor
    keep: Tensor
    slots: list[int]
    packed: Packed


def logit_rows(chunk: Chunk) -> int:
    """How many of the chunk's last places are read: one to sample, one a reference token."""
    return 1 if chunk.samples else len(chunk.targets)


def pack(chunks: Sequence[Chunk], cache: KvCache, dtype: torch.dtype, device: torch.device) -> Pack:
    """Decodes must come before all other chunks."""
    ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    keep: list[int] = []
    slots: list[int] = []
    segments: list[Segment] = []
    for chunk in chunks:
        sequence = chunk.sequence
        if not chunk.decode:
            table = torch.tensor([sequence.blocks], device=device) if chunk.start else None
            segments.append(Segment(len(ids), chunk.start, chunk.end, table, device, dtype))
        ids += sequence.tokens[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        places += _places(sequence.blocks, chunk.start, chunk.end, cache.block_tokens)
        slots += [sequence.pin.slot if sequence.pin else -1] * chunk.count
        keep += range(len(ids) - logit_rows(chunk), len(ids))
    decodes = _decodes([chunk for chunk in chunks if chunk.decode], cache.block_tokens, dtype, device)
    packed = Packed(cache, torch.tensor(places, device=device), decodes, segments)
    flat = torch.tensor([ids, positions], device=device)
    return Pack(flat[:1], flat[1:], torch.tensor(keep, dtype=torch.long, device=device), slots, packed)


def pack_alone(tokens: Sequence[int], keep: int, slot: int, dtype: torch.dtype, device: torch.device) -> Pack:
    """One sequence that leaves no keys behind; the logits of its last `keep` places are read."""
    count = len(tokens)
    segment = Segment(0, 0, count, None, device, dtype)
    places = torch.arange(count, device=device)
    ids = torch.tensor([list(tokens)], device=device)
    return Pack(ids, places[None], places[count - keep :], [slot] * count, Packed(None, None, None, [segment]))


def _places(blocks: Sequence[int], start: int, end: int, block_tokens: int) -> list[int]:
    return [blocks[at // block_tokens] * block_tokens + at % block_tokens for at in range(start, end)]


def _decodes(chunks: Sequence[Chunk], block_tokens: int, dtype: torch.dtype, device: torch.device) -> Decodes | None:
    if not chunks:
        return None
    width = max(len(chunk.sequence.blocks) for chunk in chunks)
    padded = chain.from_iterable((*c.sequence.blocks, *[NULL_BLOCK] * (width - len(c.sequence.blocks))) for c in chunks)
    tables = torch.tensor(list(padded), device=device).view(len(chunks), width)
    positions = torch.tensor([chunk.start for chunk in chunks], device=device)
    return Decodes(tables, positions, block_tokens, dtype)
