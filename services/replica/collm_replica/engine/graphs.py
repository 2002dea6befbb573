"""Decode steps as CUDA graphs: one a bucket of batch sizes, over buffers that never move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from collm_replica.engine.attention import Decodes, KvCache, Packed
from collm_replica.engine.decoder import Decoder
from collm_replica.engine.groups import Selection
from collm_replica.engine.kv import NULL_BLOCK
from collm_replica.engine.operators import Inputs
from collm_replica.engine.sampler import greedy
from collm_replica.engine.sequence import Chunk
from collm_replica.engine.transfer import upload

NOWHERE = -1
"""The place of a token that is not stored: one that only fills a bucket."""


@dataclass(frozen=True)
class Graph:
    """What a replay writes: `logits` `[bucket, vocabulary]` and the likeliest `tokens` `[bucket]` (-1: not finite)."""

    graph: Any
    logits: Tensor
    tokens: Tensor


class DecodeGraphs:
    """Graphs are captured by `capture`, one with and one without adapters for each bucket.

    `recent` `[max_batch]` are the tokens that the step before has chosen: a token -1 - i is the i-th of them.
    """

    def __init__(
        self, decoder: Decoder, cache: KvCache, recent: Tensor, max_batch: int, context_tokens: int, slots: int
    ) -> None:
        self._decoder, self._cache, self._recent, self._slots = decoder, cache, recent, slots
        self._buckets = buckets(max_batch)
        width = -(-context_tokens // cache.block_tokens)
        device, largest = recent.device, self._buckets[-1]
        self._numbers = torch.zeros(4, largest, dtype=torch.int32, device=device)
        self._tables = torch.full((largest, width), NULL_BLOCK, dtype=torch.int32, device=device)
        self._graphs: dict[tuple[int, bool], Graph] = {}
        self._pool: Any = None

    @torch.inference_mode()
    def capture(self) -> None:
        """All buckets, the largest first: later ones reuse its memory."""
        self._numbers[2:] = NOWHERE
        for bucket in reversed(self._buckets):
            for lora in (True, False) if self._slots else (False,):
                self._graphs[bucket, lora] = self._capture(bucket, lora)

    def run(self, chunks: Sequence[Chunk]) -> Graph:
        """Decode one token of each; the first len(chunks) rows of the result count, until the next call."""
        count = len(chunks)
        bucket = next(size for size in self._buckets if size >= count)
        numbers = _numbers(chunks, bucket, self._cache.block_tokens)
        tables = [chunk.sequence.blocks for chunk in chunks]
        device = self._recent.device
        self._numbers[:, :bucket].copy_(upload(numbers, torch.int32, device))
        width = max(map(len, tables))
        rows = [[*blocks, *[NULL_BLOCK] * (width - len(blocks))] for blocks in tables]
        self._tables[:count, :width].copy_(upload(rows, torch.int32, device))
        graph = self._graphs[bucket, any(slot >= 0 for slot in numbers[3])]
        graph.graph.replay()
        return graph

    def _capture(self, bucket: int, lora: bool) -> Graph:
        side: Any = torch.cuda.Stream
        stream = side()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(bucket, lora)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits, tokens = self._forward(bucket, lora)
        self._pool = self._pool or graph.pool()
        return Graph(graph, logits, tokens)

    def _forward(self, bucket: int, lora: bool) -> tuple[Tensor, Tensor]:
        ids, positions, places, slots = self._numbers[:, :bucket].unbind()
        selection = Selection(slots, 0, self._slots - 1, self._cache.keys[0].dtype) if lora else None
        decodes = Decodes(self._tables[:bucket], positions, self._cache.block_tokens, self._cache.keys[0].dtype)
        packed = Packed(self._cache, places, decodes, [])
        logits = self._decoder.forward(Inputs(resolve(ids, self._recent), positions, None, selection, packed))
        return logits, greedy(logits)


def resolve(ids: Tensor, recent: Tensor) -> Tensor:
    """Tokens, with -1 - i replaced by the i-th recent one (any token if that was none)."""
    return torch.where(ids < 0, recent[(-1 - ids).clamp(min=0)].clamp(min=0), ids)


def buckets(max_batch: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ... up to the first that holds `max_batch`."""
    sizes = [1, 2, 4, 8, 16]
    while sizes[-1] < max_batch:
        sizes.append(sizes[-1] * 3 // 2 if sizes[-1] & (sizes[-1] - 1) == 0 else sizes[-1] * 4 // 3)
    return sizes[: next(i for i, size in enumerate(sizes) if size >= max_batch) + 1]


def _numbers(chunks: Sequence[Chunk], bucket: int, block_tokens: int) -> list[list[int]]:
    """Token, position, place and slot of each chunk, filled up to the bucket."""
    rows = []
    for chunk in chunks:
        sequence, at = chunk.sequence, chunk.start
        place = sequence.blocks[at // block_tokens] * block_tokens + at % block_tokens
        rows.append((sequence.tokens[at], at, place, sequence.pin.slot if sequence.pin else -1))
    rows += [(0, 0, NOWHERE, -1)] * (bucket - len(chunks))
    return [list(column) for column in zip(*rows, strict=True)]
