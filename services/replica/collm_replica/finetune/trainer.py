"""Local training of one federated round, a micro-step at a time, so that its caller can pause or stop between."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from collm_common.errors import AdapterError, DataError, ModelError
from collm_common.messages import Hyperparams, TrainRound
from collm_common.types import Quality
from collm_replica.finetune.gradients import GradientSum, square
from collm_replica.finetune.lora import Lora
from collm_replica.finetune.loss import answer_loss, quality
from collm_replica.finetune.lowrank import at_rank, rank
from collm_replica.finetune.noise import MicroGradient, NoiseScale
from collm_replica.finetune.samples import Dataset, Sample, build, collate, draws, read_folder

log = logging.getLogger(__name__)
MAX_FACTOR = 2.0

MOST_SKIPPED = 3


class StepReport(Struct, frozen=True):
    """One optimiser step. `step` counts from 1 in this round; `loss` is the mean over its tokens (nats).

    `batch` is B at its end, `micro_step_s` the mean duration of the micro-steps of that B, `samples` those of all.
    `peak_bytes` of at most `limit_bytes` is GPU memory of this process beyond the shared weights; 0 on a CPU, and while
    memory is plentiful.
    """

    step: int
    loss: float
    micro_step_s: float
    batch: int
    samples: int
    noise_scale: float | None
    peak_bytes: int = 0
    limit_bytes: int = 0


class Trainer:
    """Holds the model, this replica's data and one round's progress. Not thread-safe: one call at a time.

    Optimiser state lives through a round and starts anew with the next: after an aggregation its moments belong to
    other factors.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ModelError when the tokenizer has no EOS."""
        if tokenizer.eos_token_id is None:
            raise ModelError("the tokenizer has no EOS token: no answer that is learnt could end")
        self._base = model
        self._tokenizer = tokenizer
        self._device = next(model.parameters()).device
        self._pad = int(tokenizer.eos_token_id)
        self._injected: Lora | None = None
        self._recomputes = False
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
        data = build(read_folder(folder), self._tokenizer, hyper.max_tokens, hyper.heldout_samples)
        counts = (len(data.train), len(data.heldout), data.too_long, data.repeated)
        log.info("data: %d to train, %d held out, %d too long, %d repeated", *counts)
        if not data.train or not data.heldout:
            raise DataError(f"{folder} has too few samples of at most {hyper.max_tokens} tokens to train and hold out")
        self.data, self._data_state = data, state
        return True

    # --- a round

    def start_round(self, task: TrainRound, start: Mapping[str, torch.Tensor] | None) -> None:
        """Begin at `start`, or (None) at fresh weights that `task.seed` makes equal on all clients."""
        lora = self._adapter(task.hyper)
        lora.load(lora.fresh(task.seed) if start is None else at_rank(start, task.hyper.rank))
        self._task = task
        self._optimizer = torch.optim.AdamW(lora.parameters, lr=task.hyper.learning_rate, weight_decay=0.0)
        self._draws = draws(self.data.train, task.seed + task.round)
        self._anchor = [parameter.detach().clone() for parameter in lora.parameters] if task.hyper.proximal else []
        self._step = self._skipped = self.samples_seen = 0
        self._previous: tuple[MicroGradient, list[torch.Tensor]] | None = None
        self.noise = NoiseScale()
        self._begin_step()
        self.set_batch(task.sizes.train)
        self.done = False

    def set_batch(self, batch: int) -> None:
        """B from the next micro-step on; 0 leaves it as it is. May be called during a micro-step."""
        if batch > 0:
            self.batch = batch

    def micro_step(self) -> StepReport | None:
        """Forward and backward of B samples; a report when that completed an optimiser step.

        Samples whose gradient is not finite are left out; MOST_SKIPPED times in a row, training has diverged:
        AdapterError.
        """
        assert not self.done
        self._lora.model.train()
        samples = [next(self._draws) for _ in range(self.batch)]
        started_s = time.monotonic()
        while (loss := self._backward(samples)) is None:
            if self._device.type == "cuda" and not self._recomputes:
                # Half as much again to compute, a quarter of the memory: only where memory is short.
                recompute: Any = self._base.gradient_checkpointing_enable
                recompute({"use_reentrant": False})
                self._recomputes = True
                log.warning("out of memory: activations are recomputed from now on")
                started_s = time.monotonic()
                continue
            samples = samples[: len(samples) // 2]
            self.batch = len(samples)
            log.warning("out of memory: the micro-batch is now %d", self.batch)
            started_s = time.monotonic()
        if not self._gradients.take(*loss, len(samples)):
            self._skip(*loss, len(samples))
            return None
        self._skipped = 0
        self._durations.append((len(samples), time.monotonic() - started_s))
        self.samples_seen += len(samples)
        return self._optimise() if len(self._durations) == self._task.hyper.accumulation else None

    def fresh(self, hyper: Hyperparams, seed: int) -> dict[str, torch.Tensor]:
        """The weights that version 0 stands for in a job with this seed."""
        return self._adapter(hyper).fresh(seed)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The adapter as it is now, float32 copies on the CPU under PEFT's saved names."""
        return self._lora.tensors()

    # --- held-out data

    def evaluate(self) -> Quality:
        """Token-level cross-entropy (nats) of the held-out answers under the adapter as it is now."""
        return self._quality()

    def evaluate_stored(self, tensors: Mapping[str, torch.Tensor] | None, hyper: Hyperparams) -> Quality:
        """The same under other tensors (None: the base model); what is being trained stays, at its own rank."""
        lora = self._adapter(hyper if tensors is None else hyper.at_rank(rank(tensors)))
        if tensors is None:
            with lora.model.disable_adapter():
                return self._quality()
        kept = lora.tensors()
        try:
            lora.load(tensors)
            return self._quality()
        finally:
            lora.load(kept)

    # --- inside

    @property
    def steps_done(self) -> int:
        """Optimiser steps of this round so far."""
        return self._step

    @property
    def _lora(self) -> Lora:
        assert self._injected is not None, "a round or an evaluation comes first"
        return self._injected

    @property
    def _packs(self) -> bool:
        """Not under a window: what a position sees would depend on the layer."""
        return getattr(self._base.config, "sliding_window", None) is None

    def _adapter(self, hyper: Hyperparams) -> Lora:
        """The adapter of that rank and scale; taking another one ends what is being trained."""
        if self._injected is not None and (self._injected.rank, self._injected.alpha) == (hyper.rank, hyper.alpha):
            return self._injected
        if self._injected is not None:
            self._base = self._injected.detach()
        self.done = True
        self._injected = Lora(self._base, hyper.rank, hyper.alpha)
        return self._injected

    def _begin_step(self) -> None:
        self._gradients = GradientSum(self._lora.parameters)
        self._durations: list[tuple[int, float]] = []
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _memory(self) -> tuple[int, int]:
        """(most memory that this step had allocated, what it could have had), bytes.

        Nothing while activations are kept: that memory is taken because it is there, and given up when it is not.
        """
        if self._device.type != "cuda" or not self._recomputes:
            return 0, 0
        free, total = torch.cuda.mem_get_info()
        cap = int(total * torch.cuda.get_per_process_memory_fraction())
        return torch.cuda.max_memory_allocated(), min(cap, torch.cuda.memory_reserved() + free)

    def _skip(self, loss: float, tokens: int, samples: int) -> None:
        self._skipped += 1
        step, name = self._step + 1, f"the gradient of {samples} samples"
        log.warning("step %d: %s (loss %g over %d tokens) is not finite: left out", step, name, loss, tokens)
        if self._skipped >= MOST_SKIPPED:
            raise AdapterError(f"the gradient of step {step} is not finite: lower the learning rate")

    def _backward(self, samples: list[Sample]) -> tuple[float, int] | None:
        """Leave the samples' gradient on the parameters: (summed loss, tokens); None if they do not fit."""
        try:
            total, tokens = answer_loss(self._lora.model, collate(samples, self._pad, self._packs), self._device)
            torch.autograd.backward(total)
        except torch.OutOfMemoryError:
            if len(samples) == 1:
                raise
        else:
            return float(total.detach()), tokens
        # Only here, with the exception and the graph that it holds gone, can the memory be given back.
        self._gradients.discard()
        torch.cuda.empty_cache()
        return None

    def _optimise(self) -> StepReport:
        """Step along the gradient of the mean loss over all tokens, so that accumulation changes nothing."""
        gradient = self._gradients.mean()
        mean_square = square(gradient)
        self._measure_noise(gradient, mean_square)
        for parameter, own in zip(self._lora.parameters, gradient, strict=True):
            parameter.grad = own
        for parameter, anchor in zip(self._lora.parameters, self._anchor, strict=bool(self._anchor)):
            assert parameter.grad is not None
            parameter.grad.add_(parameter.detach() - anchor, alpha=self._task.hyper.proximal)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self._task, self._step, self._gradients.samples)
        self._optimizer.step()
        self._step += 1
        batch = self._durations[-1][0]
        durations_s = [duration_s for size, duration_s in self._durations if size == batch]
        peak_bytes, limit_bytes = self._memory()
        report = StepReport(
            step=self._step,
            loss=self._gradients.loss / self._gradients.tokens,
            micro_step_s=sum(durations_s) / len(durations_s),
            batch=batch,
            samples=self._gradients.samples,
            noise_scale=self.noise.value,
            peak_bytes=peak_bytes,
            limit_bytes=limit_bytes,
        )
        self._begin_step()
        self.done = self._step >= self._task.steps
        return report

    def _measure_noise(self, gradient: list[torch.Tensor], mean_square: float) -> None:
        """A step of one micro-step makes a pair with the step before."""
        micro = self._gradients.micro
        if len(micro) > 1:
            self.noise.update(micro, mean_square)
            return
        if self._previous is not None:
            before, old = self._previous
            share = micro[0].weight / (micro[0].weight + before.weight)
            mean = [share * new + (1 - share) * past for new, past in zip(gradient, old, strict=True)]
            self.noise.update((*micro, before), square(mean))
        self._previous = micro[0], gradient

    def _quality(self) -> Quality:
        return quality(self._lora.model, self.data.heldout, self._pad, self._device, self._packs)


def learning_rate(task: TrainRound, step: int, samples: int) -> float:
    """Warm-up, then half a cosine over all steps of the job; `step` counts from 0 in this round.

    A step of M samples takes sqrt(M / M0) of it: Adam divides by the noise, which falls so (Malladi et al. 2022). Where
    the gradient is larger than its noise nothing is left to divide by: the factor ends at 2.
    """
    at = min(task.first_step + step, task.total_steps)
    warm = min(1.0, (at + 1) / max(1, task.hyper.warmup_steps))
    size = min(MAX_FACTOR, math.sqrt(samples / task.hyper.base_samples))
    return task.hyper.learning_rate * size * warm * 0.5 * (1 + math.cos(math.pi * at / (task.total_steps + 1)))
