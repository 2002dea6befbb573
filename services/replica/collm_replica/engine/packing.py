"""Chunks of many sequences -> the tensors of one call of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from collm_replica.engine.attention import Decodes, KvCache, Packed, Prefill, Segment
from collm_replica.engine.kv import NULL_BLOCK
from collm_replica.engine.sequence import Chunk
from collm_replica.engine.transfer import upload


@dataclass
class Pack:
    """`ids` and `positions` `[T]`, `keep` the places in the pack whose logits are read, `slots` one a token.

    `unresolved`: an id -1 - i stands for the i-th token that the run before has chosen.
    """

    ids: Tensor
    positions: Tensor
    keep: Tensor
    slots: list[int]
    packed: Packed
    unresolved: bool = False


def logit_rows(chunk: Chunk) -> int:
    """How many of the chunk's last places are read: one to sample, one a reference or prompt token to tell of."""
    return len(chunk.told) + (1 if chunk.samples else len(chunk.targets))


def pack(
    chunks: Sequence[Chunk], cache: KvCache, dtype: torch.dtype, device: torch.device, varlen: bool = False
) -> Pack:
    """Decodes must come before all other chunks. `varlen`: describe the segments for kernels that take all at once."""
    ids: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    keep: list[int] = []
    slots: list[int] = []
    segments: list[Segment] = []
    for chunk in chunks:
        sequence = chunk.sequence
        if not chunk.decode:
            table = upload([sequence.blocks], torch.long, device) if chunk.start and not varlen else None
            segments.append(Segment(len(ids), chunk.start, chunk.end, table, device, dtype))
        ids += sequence.tokens[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        places += _places(sequence.blocks, chunk.start, chunk.end, cache.block_tokens)
        slots += [sequence.pin.slot if sequence.pin else -1] * chunk.count
        keep += range(len(ids) - logit_rows(chunk), len(ids))
    decodes = _decodes([chunk for chunk in chunks if chunk.decode], cache.block_tokens, dtype, device)
    prefill = _prefill(chunks, segments, cache.block_tokens, device) if varlen and segments else None
    flat = upload([ids, positions, places], torch.long, device)
    packed = Packed(cache, flat[2], decodes, segments, prefill)
    return Pack(flat[0], flat[1], upload(keep, torch.long, device), slots, packed, min(ids) < 0)


def pack_alone(tokens: Sequence[int], keep: int, slot: int, dtype: torch.dtype, device: torch.device) -> Pack:
    """One sequence that leaves no keys behind; the logits of its last `keep` places are read."""
    count = len(tokens)
    segment = Segment(0, 0, count, None, device, dtype)
    places = torch.arange(count, device=device)
    ids = torch.tensor(list(tokens), device=device)
    return Pack(ids, places, places[count - keep :], [slot] * count, Packed(None, None, None, [segment]))


def _places(blocks: Sequence[int], start: int, end: int, block_tokens: int) -> list[int]:
    return [blocks[at // block_tokens] * block_tokens + at % block_tokens for at in range(start, end)]


def _decodes(chunks: Sequence[Chunk], block_tokens: int, dtype: torch.dtype, device: torch.device) -> Decodes | None:
    if not chunks:
        return None
    width = max(len(chunk.sequence.blocks) for chunk in chunks)
    padded = chain.from_iterable((*c.sequence.blocks, *[NULL_BLOCK] * (width - len(c.sequence.blocks))) for c in chunks)
    tables = upload(list(padded), torch.long, device).view(len(chunks), width)
    positions = upload([chunk.start for chunk in chunks], torch.long, device)
    return Decodes(tables, positions, block_tokens, dtype)


def _prefill(chunks: Sequence[Chunk], segments: Sequence[Segment], block_tokens: int, device: torch.device) -> Prefill:
    blocks = [chunk.sequence.blocks for chunk in chunks if not chunk.decode]
    places = [_places(held, 0, one.end, block_tokens) for held, one in zip(blocks, segments, strict=True)]
    queries = [one.end - one.start for one in segments]
    keys = [one.end for one in segments]
    ends = upload([[0, *accumulate(queries)], [0, *accumulate(keys)]], torch.int32, device)
    every = upload(list(chain.from_iterable(places)), torch.long, device)
    return Prefill(ends[0], ends[1], max(queries), max(keys), every)
