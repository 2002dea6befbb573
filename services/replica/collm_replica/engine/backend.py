"""The model that computes chunks: fused decoder, paged keys and values, LoRA slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from collm_replica.engine.attention import KvCache
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.decoder import Banks, Decoder
from collm_replica.engine.flight import Flight, losses
from collm_replica.engine.graphs import DecodeGraphs, resolve
from collm_replica.engine.groups import Selection
from collm_replica.engine.kv import block_bytes
from collm_replica.engine.operators import Inputs, Operators
from collm_replica.engine.packing import Pack, logit_rows, pack, pack_alone
from collm_replica.engine.protocol import Tensors
from collm_replica.engine.sampler import Draw, choose
from collm_replica.engine.sequence import Chunk, Pin
from collm_replica.engine.slots import Factors, SlotBank
from collm_replica.engine.support import KvShape, check_context, kv_shape


class TorchBackend:
    """Owns the KV cache and the slots of one model; `blocks` is how many KV blocks there are."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig, banks: Banks | None = None) -> None:
        """Raises ModelError if the model cannot be served within `config`."""
        shape = kv_shape(model)
        self.blocks = _block_count(shape, model.dtype.itemsize, config)
        check_context(model, config, (self.blocks - 1) * config.block_tokens)
        self._dtype, self._device = model.dtype, model.device
        self._cache = KvCache(
            shape.layers, self.blocks, config.block_tokens, shape.heads, shape.head_dim, self._dtype, self._device
        )
        self._recent = torch.zeros(config.step_tokens, dtype=torch.int32, device=self._device)
        operators = operators_for(shape.head_dim, self._dtype, self._device, config)
        slots, most = config.slots, config.context_tokens
        with torch.inference_mode():
            self._decoder = Decoder(model, operators, slots, config.max_rank, most, banks)
        self._slots = SlotBank(self._decoder.places, config.max_rank)
        self._graphs: DecodeGraphs | None = None
        if type(operators) is not Operators:
            self._graphs = DecodeGraphs(self._decoder, self._cache, self._recent, config.max_batch, most, slots)
            self._graphs.capture()

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> Flight:
        """One outcome a chunk; decodes come first. A chunk's token -1 - i is the i-th that the run before chose."""
        rows = [logit_rows(chunk) for chunk in chunks]
        best: Tensor | None = None
        if self._graphs is not None and all(chunk.decode for chunk in chunks):
            graph = self._graphs.run(chunks)
            logits, best = graph.logits[: len(chunks)], graph.tokens[: len(chunks)]
        else:
            logits = self._forward(pack(chunks, self._cache, self._dtype, self._device, self._graphs is not None))
        parts = torch.split(logits, rows)
        draws = [_draw(chunk) for chunk in chunks if chunk.samples]
        if best is None or not all(draw.greedy for draw in draws):
            sampled = [part[-1:] for chunk, part in zip(chunks, parts, strict=True) if chunk.samples]
            best = choose(torch.cat(sampled) if sum(rows) > len(sampled) else logits, draws) if sampled else None
        if best is not None:
            self._recent[: len(best)] = best
        return Flight(chunks, parts, best)

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], reference: Sequence[int], pin: Pin) -> float:
        """Summed loss (nats) of `reference` after `prompt`; touches no KV block."""
        alone = pack_alone([*prompt, *reference[:-1]], len(reference), pin.slot, self._dtype, self._device)
        return float(losses(self._forward(alone), reference))

    def stage(self, tensors: Tensors, rank: int, alpha: float) -> Factors:
        return self._slots.stage(tensors, rank, alpha)

    def load(self, slot: int, factors: Factors) -> None:
        self._slots.load(slot, factors)

    def clear(self, slot: int) -> None:
        self._slots.clear(slot)

    @torch.inference_mode()
    def scrub(self, blocks: Sequence[int]) -> None:
        self._cache.scrub(torch.tensor(list(blocks), dtype=torch.long, device=self._device))

    def _forward(self, batch: Pack) -> Tensor:
        selection = Selection.of(batch.slots, self._cache.keys[0])
        ids = resolve(batch.ids, self._recent) if batch.unresolved else batch.ids
        return self._decoder.forward(Inputs(ids, batch.positions, batch.keep, selection, batch.packed))


def operators_for(head_dim: int, dtype: torch.dtype, device: torch.device, config: EngineConfig) -> Operators:
    """Kernels where the device has them and `config.fused` allows them."""
    if device.type != "cuda" or not config.fused:
        return Operators()
    from collm_replica.engine.fused import FusedOperators

    if not FusedOperators.serves(head_dim, dtype, device):
        return Operators()
    return FusedOperators(torch.cuda.get_device_properties(device).multi_processor_count)


def _draw(chunk: Chunk) -> Draw:
    output = chunk.sequence.output
    position = chunk.end - len(chunk.sequence.request.prompt)
    return Draw(chunk.sequence.request.sampling, position, output.edits(position), output.allowed)


def _block_count(shape: KvShape, item_bytes: int, config: EngineConfig) -> int:
    """As many blocks as the budget holds, but no more than a full batch of full contexts could use."""
    size = block_bytes(shape.layers, shape.heads, shape.head_dim, config.block_tokens, item_bytes)
    return min(config.kv_bytes // size, config.most_blocks)
