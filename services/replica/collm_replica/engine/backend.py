"""The model that computes chunks: unmodified Hugging Face modules, paged keys and values, LoRA slots."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from collm_replica.engine.attention import ATTENTION, KvCache
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.kv import block_bytes
from collm_replica.engine.packing import Pack, logit_rows, pack, pack_alone
from collm_replica.engine.protocol import Broken, Outcome, Sampled, Scored, Tensors
from collm_replica.engine.sampler import Draw, logprob, sample
from collm_replica.engine.sequence import Chunk, Pin
from collm_replica.engine.slots import SlotBank
from collm_replica.engine.support import KvShape, check_context, kv_shape


class TorchBackend:
    """Owns the KV cache and the slots of one model; `blocks` is how many KV blocks there are."""

    def __init__(self, model: PreTrainedModel, config: EngineConfig) -> None:
        """Raises ModelError if the model cannot be served within `config`."""
        shape = kv_shape(model)
        self.blocks = _block_count(shape, model.dtype.itemsize, config)
        check_context(model, config, (self.blocks - 1) * config.block_tokens)
        model.train(False)
        model.set_attn_implementation(ATTENTION)
        self._model = model
        self._dtype, self._device = model.dtype, model.device
        self._cache = KvCache(
            shape.layers, self.blocks, config.block_tokens, shape.heads, shape.head_dim, self._dtype, self._device
        )
        self._slots = SlotBank(model, model.get_submodule("model.layers"), config.slots, config.max_rank)

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> list[Outcome]:
        """One outcome a chunk; decodes come first."""
        logits = self._forward(pack(chunks, self._cache, self._dtype, self._device))
        rows = [logit_rows(chunk) for chunk in chunks]
        parts = torch.split(logits, rows)
        tokens = iter(self._sample(chunks, logits, rows))
        return [
            self._sampled(chunk, part, next(tokens)) if chunk.samples else _scored(chunk, part)
            for chunk, part in zip(chunks, parts, strict=True)
        ]

    @torch.inference_mode()
    def score(self, prompt: Sequence[int], reference: Sequence[int], pin: Pin) -> float:
        """Summed loss (nats) of `reference` after `prompt`; touches no KV block."""
        alone = pack_alone([*prompt, *reference[:-1]], len(reference), pin.slot, self._dtype, self._device)
        return _loss(self._forward(alone), reference)

    def load(self, slot: int, tensors: Tensors, rank: int, alpha: float) -> None:
        self._slots.load(slot, tensors, rank, alpha)

    def clear(self, slot: int) -> None:
        self._slots.clear(slot)

    @torch.inference_mode()
    def scrub(self, blocks: Sequence[int]) -> None:
        self._cache.scrub(torch.tensor(list(blocks), dtype=torch.long, device=self._device))

    def _forward(self, batch: Pack) -> Tensor:
        self._slots.select(batch.slots)
        output = self._model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=batch.keep,
            packed=batch.packed,
        )
        logits: Tensor = output.logits[0]
        return logits

    @staticmethod
    def _sample(chunks: Sequence[Chunk], logits: Tensor, rows: Sequence[int]) -> list[int | None]:
        draws, at, places = [], 0, []
        for chunk, count in zip(chunks, rows, strict=True):
            if chunk.samples:
                output = chunk.sequence.output
                draws.append(Draw(chunk.sequence.request.sampling, len(output.tokens), output.edits, output.allowed))
                places.append(at)
            at += count
        if not draws:
            return []
        return sample(logits if len(places) == len(logits) else logits[places], draws)

    @staticmethod
    def _sampled(chunk: Chunk, logits: Tensor, token: int | None) -> Outcome:
        if token is None:
            return Broken("the model's logits are not finite")
        count = chunk.sequence.request.sampling.logprobs
        return Sampled(token, None if count is None else logprob(logits[0], token, count))


def _scored(chunk: Chunk, logits: Tensor) -> Outcome:
    if not chunk.targets:
        return None
    nll = _loss(logits, chunk.targets)
    return Scored(nll) if math.isfinite(nll) else Broken("the reference's loss is not finite")


def _loss(logits: Tensor, targets: Sequence[int]) -> float:
    wanted = torch.tensor(list(targets), device=logits.device)
    return float(cross_entropy(logits.float(), wanted, reduction="sum"))


def _block_count(shape: KvShape, item_bytes: int, config: EngineConfig) -> int:
    """As many blocks as the budget holds, but no more than a full batch of full contexts could use."""
    size = block_bytes(shape.layers, shape.heads, shape.head_dim, config.block_tokens, item_bytes)
    return min(config.kv_bytes // size, config.most_blocks)
