"""Training on a GPU: recomputed activations, bfloat16 weights, and memory that is really full."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from collm_common.messages import Hyperparams, TrainRound
from collm_common.types import BatchSizes
from collm_replica.finetune.records import Record
from collm_replica.finetune.samples import build
from collm_replica.finetune.trainer import Trainer
from tests.support.models import byte_tokenizer, tiny_model_folder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

HYPER = Hyperparams(rank=4, alpha=8.0, learning_rate=1e-2, max_tokens=200, heldout_samples=4, warmup_steps=1)
ROOM_BYTES = 256 << 20


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    folder = tiny_model_folder(tmp_path, "llama")
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    made = Trainer(model.to("cuda"), byte_tokenizer())  # type: ignore[arg-type]
    records = [Record((("user", f"{n}?"),), f"the desk is {n % 4}") for n in range(32)]
    made.data = build(records, byte_tokenizer(), HYPER.max_tokens, HYPER.heldout_samples)
    yield made
    torch.cuda.set_per_process_memory_fraction(1.0)


def round_(steps: int, batch: int) -> TrainRound:
    return TrainRound(
        job="j",
        round=1,
        adapter="desk",
        start=0,
        sizes=BatchSizes(batch, 1),
        steps=steps,
        first_step=0,
        total_steps=steps,
        hyper=HYPER,
        deadline_s=1e12,
    )


def run(trainer: Trainer, task: TrainRound) -> dict[str, torch.Tensor]:
    trainer.start_round(task, None)
    while not trainer.done:
        trainer.micro_step()
    return trainer.tensors()


def test_training_lowers_the_heldout_cross_entropy_and_leaves_the_base_alone(trainer: Trainer) -> None:
    """Recomputation through which no gradient reaches the adapters, or a write into the weights that serve."""
    before = trainer.evaluate_stored(None, HYPER)
    base = {name: p.detach().clone() for name, p in trainer._base.named_parameters() if "lora_" not in name}
    run(trainer, round_(steps=12, batch=4))
    assert trainer.evaluate().cross_entropy < before.cross_entropy * 0.8
    now = dict(trainer._base.named_parameters())
    assert all(torch.equal(weight, now[name]) for name, weight in base.items())


def test_recomputed_activations_change_nothing_but_memory(trainer: Trainer) -> None:
    """Checkpoints that recompute another forward pass than the one whose loss was taken."""
    there = run(trainer, round_(steps=2, batch=4))
    recompute: Any = trainer._base.gradient_checkpointing_enable
    recompute({"use_reentrant": False})
    back = run(trainer, round_(steps=2, batch=4))
    assert all(torch.allclose(tensor, back[name], atol=1e-3) for name, tensor in there.items())


def test_a_full_device_halves_the_batch_and_the_round_goes_on(
    trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    """Memory that the failed pass still holds while the smaller one is tried, down to a batch of one."""
    run(trainer, round_(steps=1, batch=1))
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + ROOM_BYTES) / total)
    with caplog.at_level(logging.WARNING):
        run(trainer, round_(steps=2, batch=16384))
    assert 64 <= trainer.batch < 16384
    assert "activations are recomputed" in caplog.text
    assert "the micro-batch is now" in caplog.text
    assert trainer.samples_seen == 2 * trainer.batch
