"""Cross-entropy of answers, computed for no other position than those that predict one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from collm_common.errors import DataError
from collm_common.types import Quality
from collm_replica.finetune.samples import IGNORED, Batch, Sample, collate

EVALUATION_BATCH = 4


def precision(model: Any) -> torch.autocast:
    """Products of float32 adapters in the precision of the base; their weights and gradients stay float32."""
    return torch.autocast(model.device.type, model.dtype, enabled=model.dtype != torch.float32)


def answer_loss(model: Any, batch: Batch, device: torch.device) -> tuple[torch.Tensor, int]:
    """Summed cross-entropy (nats) of the answer tokens, and how many there are. A first token has no prediction."""
    following = batch.labels[:, 1:]
    predicting = (following != IGNORED).any(0).nonzero()[:, 0]
    labels = following[:, predicting]
    with precision(model):
        output = model(
            input_ids=batch.ids.to(device),
            position_ids=batch.positions.to(device),
            attention_mask=batch.mask.to(device),
            logits_to_keep=predicting.to(device),
            use_cache=False,
        )
    logits = output.logits.flatten(0, 1).float()
    total = cross_entropy(logits, labels.flatten().to(device), ignore_index=IGNORED, reduction="sum")
    return total, int((labels != IGNORED).sum())


@torch.no_grad()
def quality(model: Any, samples: Sequence[Sample], pad: int, device: torch.device, pack: bool = False) -> Quality:
    """Token-level cross-entropy (nats) of all answers, in small batches. Raises DataError without samples."""
    if not samples:
        raise DataError("no held-out samples to measure on")
    model.eval()
    total, tokens = 0.0, 0
    for start in range(0, len(samples), EVALUATION_BATCH):
        loss, count = answer_loss(model, collate(samples[start : start + EVALUATION_BATCH], pad, pack), device)
        total, tokens = total + float(loss), tokens + count
    return Quality(total / tokens, tokens)
