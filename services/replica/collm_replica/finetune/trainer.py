"""Local training of one federated round, a micro-step at a time, so that its caller can pause or stop between."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from collm_common.errors import DataError
from collm_common.messages import Hyperparams, TrainRound
from collm_common.types import Quality
from msgspec import Struct
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collm_replica.finetune.lora import Lora
from collm_replica.finetune.noise import NoiseScale
from collm_replica.finetune.samples import IGNORED, Batch, Dataset, Sample, build, collate, draws, read_folder

log = logging.getLogger(__name__)

EVALUATION_BATCH = 4


class StepReport(Struct, frozen=True):
    """One optimiser step. `step` counts from 1 in this round; `batch` is B, `micro_step_s` the mean duration of one."""

    step: int
    loss: float
    micro_step_s: float
    batch: int
    samples: int
    noise_scale: float | None


class Trainer:
    """Holds the model, this replica's data and one round's progress. Not thread-safe: one call at a time.

    Optimiser state lives through a round and starts anew with the next: after an aggregation its moments belong to
    other factors.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._base = model
        self._tokenizer = tokenizer
        self._device = next(model.parameters()).device
        self._pad = int(tokenizer.eos_token_id)
        self._lora: Lora | None = None
        self._data_state: object = None
        self.data = Dataset((), ())
        self.noise = NoiseScale()
        self.batch = 1
        self.done = True
        self.samples_seen = 0

    # --- data

    def load_data(self, folder: Path, hyper: Hyperparams) -> bool:
        """Read the folder if it, or what is asked of it, changed; whether it did. Raises DataError."""
        files = sorted((str(path), path.stat().st_mtime_ns) for path in folder.rglob("*.jsonl"))
        state = (files, hyper.max_tokens, hyper.heldout_samples)
        if state == self._data_state:
            return False
        self.data = build(read_folder(folder), self._tokenizer, hyper.max_tokens, hyper.heldout_samples)
        self._data_state = state
        counts = (len(self.data.train), len(self.data.heldout), self.data.too_long, self.data.repeated)
        log.info("data: %d to train, %d held out, %d too long, %d repeated", *counts)
        if not self.data.train or not self.data.heldout:
            raise DataError(f"{folder} has too few samples of at most {hyper.max_tokens} tokens to train and hold out")
        return True

    # --- a round

    def start_round(self, task: TrainRound, start: Mapping[str, torch.Tensor] | None) -> None:
        """Begin at `start`, or (None) at fresh weights that `task.seed` makes equal on all clients."""
        lora = self._adapter(task.hyper)
        if start is None:
            lora.reset(task.seed)
        else:
            lora.load(start)
        self._task = task
        self._optimizer = torch.optim.AdamW(lora.parameters, lr=task.hyper.learning_rate, weight_decay=0.0)
        self._draws = draws(self.data.train, task.seed + task.round)
        self._step = self._micro = self.samples_seen = 0
        self._previous: list[torch.Tensor] | None = None
        self.noise = NoiseScale()
        self._begin_step()
        self.set_batch(task.sizes.train)
        self.done = False

    def set_batch(self, batch: int) -> None:
        """B from the next micro-step on; 0 leaves it as it is."""
        if batch > 0:
            self.batch = batch

    def micro_step(self) -> StepReport | None:
        """Forward and backward of B samples; a report when that completed an optimiser step."""
        assert not self.done
        assert self._lora is not None
        started_s = time.monotonic()
        self._lora.model.train()
        loss = self._backward([next(self._draws) for _ in range(self.batch)])
        self._micro += 1
        self._losses.append(loss)
        self._durations.append(time.monotonic() - started_s)
        self.samples_seen += self.batch
        if self._micro < self._task.hyper.accumulation:
            return None
        return self._optimise()

    def tensors(self) -> dict[str, torch.Tensor]:
        """The adapter as it is now, float32 copies on the CPU under PEFT's saved names."""
        assert self._lora is not None
        return self._lora.tensors()

    # --- held-out data

    def evaluate(self) -> Quality:
        """Token-level cross-entropy (nats) of the held-out answers under the adapter as it is now."""
        assert self._lora is not None
        return self._evaluate()

    def evaluate_stored(self, tensors: Mapping[str, torch.Tensor] | None, hyper: Hyperparams) -> Quality:
        """The same under other tensors (None: the base model); what is being trained stays as it is."""
        lora = self._adapter(hyper)
        if tensors is None:
            with lora.model.disable_adapter():
                return self._evaluate()
        kept = lora.tensors()
        try:
            lora.load(tensors)
            return self._evaluate()
        finally:
            lora.load(kept)

    # --- inside

    def _adapter(self, hyper: Hyperparams) -> Lora:
        if self._lora is not None and (self._lora.rank, self._lora.alpha) == (hyper.rank, hyper.alpha):
            return self._lora
        if self._lora is not None:
            self._base = self._lora.detach()
        self._lora = Lora(self._base, hyper.rank, hyper.alpha)
        if self._device.type == "cuda":
            self._lora.model.gradient_checkpointing_enable({"use_reentrant": False})
            self._lora.model.enable_input_require_grads()
        return self._lora

    def _begin_step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._micro = 0
        self._tokens = 0
        self._losses: list[float] = []
        self._durations: list[float] = []
        self._micro_squares: list[float] = []

    def _backward(self, samples: list[Sample]) -> float:
        """Add the gradient of the batch's summed token loss; on a GPU a batch that does not fit is halved."""
        assert self._lora is not None
        before = self._gradient()
        try:
            return self._backward_once(samples, before)
        except torch.cuda.OutOfMemoryError:
            if len(samples) == 1:
                raise
            torch.cuda.empty_cache()
            for index, parameter in enumerate(self._lora.parameters):
                parameter.grad = None if before is None else before[index].clone()
            self.batch = max(1, self.batch // 2)
            log.warning("out of memory: the micro-batch is now %d", self.batch)
            return self._backward(samples[: self.batch])

    def _backward_once(self, samples: list[Sample], before: list[torch.Tensor] | None) -> float:
        total, tokens = self._loss(collate(samples, self._pad))
        total.backward()  # type: ignore[no-untyped-call]
        after = self._gradient()
        assert after is not None
        own = after if before is None else [new - old for new, old in zip(after, before, strict=True)]
        self._micro_squares.append(_square(own) / tokens**2)
        self._tokens += tokens
        return float(total.detach()) / tokens

    def _gradient(self) -> list[torch.Tensor] | None:
        """Copies of the accumulated gradient; None before the first micro-step."""
        assert self._lora is not None
        gradients = [parameter.grad for parameter in self._lora.parameters]
        if any(gradient is None for gradient in gradients):
            return None
        return [gradient.clone() for gradient in gradients if gradient is not None]

    def _optimise(self) -> StepReport:
        """The gradient of the mean loss over all tokens of all micro-steps, so that accumulation changes nothing."""
        assert self._lora is not None
        for parameter in self._lora.parameters:
            assert parameter.grad is not None
            parameter.grad /= self._tokens
        gradient = self._gradient()
        assert gradient is not None
        self._measure_noise(gradient)
        rate = learning_rate(self._task, self._step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._step += 1
        report = StepReport(
            step=self._step,
            loss=sum(self._losses) / len(self._losses),
            micro_step_s=sum(self._durations) / len(self._durations),
            batch=self.batch,
            samples=self.batch * self._micro,
            noise_scale=self.noise.value,
        )
        self._begin_step()
        self.done = self._step >= self._task.steps
        return report

    def _measure_noise(self, gradient: list[torch.Tensor]) -> None:
        if self._micro > 1:
            micro_square = sum(self._micro_squares) / self._micro
            self.noise.update(micro_square, _square(gradient), self._micro, self.batch)
            return
        if self._previous is not None:
            mean = [(new + old) / 2 for new, old in zip(gradient, self._previous, strict=True)]
            micro_square = (_square(gradient) + _square(self._previous)) / 2
            self.noise.update(micro_square, _square(mean), 2, self.batch)
        self._previous = gradient

    @torch.no_grad()
    def _evaluate(self) -> Quality:
        assert self._lora is not None
        self._lora.model.eval()
        heldout, total, tokens = self.data.heldout, 0.0, 0
        for start in range(0, len(heldout), EVALUATION_BATCH):
            loss, count = self._loss(collate(heldout[start : start + EVALUATION_BATCH], self._pad))
            total, tokens = total + float(loss), tokens + count
        return Quality(total / tokens, tokens)

    def _loss(self, batch: Batch) -> tuple[torch.Tensor, int]:
        """Summed cross-entropy (nats) of the answer tokens, and how many there are."""
        assert self._lora is not None
        first = int((batch.labels != IGNORED).any(0).nonzero()[0])
        keep = torch.arange(first - 1, batch.ids.shape[1] - 1, device=self._device)
        output: Any = self._lora.model(
            input_ids=batch.ids.to(self._device),
            attention_mask=batch.mask.to(self._device),
            logits_to_keep=keep,
            use_cache=False,
        )
        labels = batch.labels[:, first:].to(self._device)
        total = cross_entropy(
            output.logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return total, int((batch.labels != IGNORED).sum())


def learning_rate(task: TrainRound, step: int) -> float:
    """Warm-up, then half a cosine over all steps of the job; `step` counts from 0 in this round."""
    at = task.first_step + step
    warm = min(1.0, (at + 1) / max(1, task.hyper.warmup_steps))
    return task.hyper.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * at / (task.total_steps + 1)))


def _square(tensors: list[torch.Tensor]) -> float:
    return float(sum(tensor.double().pow(2).sum() for tensor in tensors))
