"""What the fine-tuning process does for a job: train a round, aggregate, evaluate; one task at a time."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
import torch
from redis.asyncio import Redis

from collm_common import messages, post
from collm_common.broker import patiently
from collm_common.clock import Clock
from collm_common.errors import AdapterError, CollmError
from collm_common.messages import (
    Aggregate,
    Aggregated,
    Evaluate,
    Evaluated,
    Event,
    TrainReport,
    TrainRound,
    UpdateUploaded,
)
from collm_common.registry import Registry
from collm_common.types import AdapterRef, Quality
from collm_replica import adapters
from collm_replica.adapter_feed import AdapterFeed
from collm_replica.channel import Finished, Snapshot, ToSupervisor, Training
from collm_replica.exchange import PATIENCE_S, Exchange
from collm_replica.finetune import privacy
from collm_replica.finetune.aggregation import Plan, aggregate
from collm_replica.finetune.privacy import Ledger, privatise
from collm_replica.finetune.trainer import StepReport, Trainer
from collm_replica.settings import ReplicaSettings
from collm_replica.sm_share import sm_share
from collm_replica.tasks import MAX_REASON, Task, failed

log = logging.getLogger(__name__)

MAX_TASKS = 16
MOST_YIELDED_S = 2.0
MAX_MEASURED = 8


class Left(CollmError):
    """The replica was told to leave the job: what it did so far is thrown away."""


class Say(Protocol):
    """Sends to the supervisor."""

    async def __call__(self, message: ToSupervisor) -> None:
        """One message."""


class TrainingTasks:
    """Commands change it at any time; the trainer is touched only by the running task, a micro-step at a time."""

    def __init__(
        self, settings: ReplicaSettings, redis: Redis, trainer: Trainer, base_digest: str, clock: Clock, say: Say
    ) -> None:
        self.settings, self.redis, self.trainer, self.clock = settings, redis, trainer, clock
        self.keys, self._say = settings.keys, say
        self.progress = 0
        self.busy = False
        self._feed = AdapterFeed(redis, self.keys, base_digest, adapters.decode)
        self._exchange = Exchange(redis, self.keys, settings.id, base_digest)
        self._registry = Registry(redis, self.keys)
        self._queue: asyncio.Queue[Task] = asyncio.Queue(MAX_TASKS)
        self._going = asyncio.Event()
        self._going.set()
        self._unhurried = asyncio.Event()
        self._unhurried.set()
        self._left = ""
        self._training_batch = 0
        self._sm_share = sm_share(os.environ)
        self._measured: dict[tuple[str, int], Quality] = {}

    # --- commands

    def add(self, task: Task) -> None:
        """Do it after those that were added before; one too many is dropped and fails by its deadline."""
        try:
            self._queue.put_nowait(task)
        except asyncio.QueueFull:
            log.error("dropping a %s: %d tasks wait", messages.kind(task), MAX_TASKS)

    def pause(self) -> None:
        """Stop after the running micro-step."""
        self._going.clear()

    def resume(self) -> None:
        """Go on."""
        self._going.set()

    def let_decoding_go_first(self, wanted: bool) -> None:
        """Wait between micro-steps, at most MOST_YIELDED_S each time: more than that is the coordinator's choice."""
        if wanted:
            self._unhurried.clear()
        else:
            self._unhurried.set()

    def leave(self, job: str) -> None:
        """Drop what is done and queued for `job`."""
        self._left = job
        self._going.set()
        queued = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        for task in queued:
            if task.job != job:
                self._queue.put_nowait(task)

    # --- tasks

    async def run(self) -> None:
        """For ever. A task that fails is reported and costs nothing else."""
        while True:
            task = await self._queue.get()
            self.busy = True
            try:
                await self._do(task)
            except Left:
                log.info("left job %s", task.job)
            except Exception as error:
                log.exception("%s of job %s failed", messages.kind(task), task.job)
                reason = f"{type(error).__name__}: {error}"
                await self._announce(failed(task, self.settings.id, reason, self.clock.now()), task.job)
            finally:
                self.busy = False
                await self._set_training(0)
                await self._say(Finished(task=messages.kind(task)))

    async def _do(self, task: Task) -> None:
        self._left = ""
        match task:
            case TrainRound():
                await self._train(task)
            case Aggregate():
                await self._aggregate(task)
            case Evaluate():
                quality = await self._measure(task.adapter, task.version, task.hyper)
                event = Evaluated(
                    job=task.job,
                    round=task.round,
                    replica=self.settings.id,
                    adapter=task.adapter,
                    version=task.version,
                    quality=quality,
                    time_s=self.clock.now(),
                )
                await self._announce(event, task.job)

    async def _train(self, task: TrainRound) -> None:
        await self._refresh_data(task.hyper)
        start = await self._stored(task.adapter, task.start)
        best = await self._measure(task.adapter, task.start, task.hyper) if task.hyper.snapshot_steps else None
        await asyncio.to_thread(self.trainer.start_round, task, start)
        begun = self.trainer.tensors() if task.hyper.clip_norm else {}
        losses: list[float] = []
        report: StepReport | None = None
        while not self.trainer.done and not self._late(task):
            await self._yield_point(task)
            await self._set_training(self.trainer.batch)
            step = await asyncio.to_thread(self.trainer.micro_step)
            self.progress += 1
            if step is None:
                continue
            report = step
            losses.append(step.loss)
            await self._report(task, step)
            if best is not None and step.step % task.hyper.snapshot_steps == 0:
                best = await self._snapshot(task, task.first_step + step.step, best)
        assert report is not None
        await self._upload(task, begun, losses, report.noise_scale)

    def _late(self, task: TrainRound) -> bool:
        """Whether what is done must do; a client that is merely slow still counts."""
        return self.trainer.steps_done > 0 and self.clock.now() > task.upload_by_s

    async def _yield_point(self, task: TrainRound) -> None:
        """Between two micro-steps: wait while paused, leave when told to, give up at the deadline."""
        if not self._going.is_set():
            self.busy = False
            await self._set_training(0)
            try:
                await asyncio.wait_for(self._going.wait(), max(0.0, task.deadline_s - self.clock.now()))
            except TimeoutError as error:
                raise AdapterError("paused until after the round's deadline") from error
            self.busy = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._unhurried.wait(), MOST_YIELDED_S)
        if self._left == task.job:
            raise Left
        if self.clock.now() > task.deadline_s:
            raise AdapterError("the round's deadline has passed")

    async def _snapshot(self, task: TrainRound, step: int, best: Quality) -> Quality:
        """Give the tensors to this replica's own engine, unless held-out cross-entropy got worse; the best so far."""
        quality = await asyncio.to_thread(self.trainer.evaluate)
        if self._left == task.job:
            raise Left
        if quality.cross_entropy > best.cross_entropy:
            log.info(
                "step %d: held-out %.4f is not below %.4f: no snapshot", step, quality.cross_entropy, best.cross_entropy
            )
            return best
        ref = AdapterRef(task.adapter, f"{task.start}.{step}")
        self.settings.snapshots.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.settings.snapshots / f"{step}.safetensors"
        await asyncio.to_thread(adapters.write_file, path, self.trainer.tensors())
        await self._say(Snapshot(ref=ref, path=str(path), rank=task.hyper.rank, alpha=task.hyper.alpha))
        return quality

    async def _upload(
        self, task: TrainRound, begun: adapters.Tensors, losses: list[float], noise_scale: float | None
    ) -> None:
        hyper, tensors, epsilon = task.hyper, self.trainer.tensors(), None
        if hyper.noise_multiplier:
            mu = await asyncio.to_thread(Ledger(Path(self.settings.data_dir)).spend, hyper.noise_multiplier)
            epsilon = privacy.epsilon(mu, hyper.delta)
        if hyper.clip_norm:
            secret = torch.Generator().manual_seed(secrets.randbits(63))
            tensors = privatise(tensors, begun, hyper.clip_norm, hyper.noise_multiplier, secret)
        await self._exchange.give(task, tensors, self.trainer.samples_seen, self.trainer.steps_done)
        event = UpdateUploaded(
            job=task.job,
            round=task.round,
            replica=self.settings.id,
            samples=self.trainer.samples_seen,
            loss=sum(losses) / len(losses),
            loss_last=losses[-1],
            noise_scale=noise_scale,
            epsilon=epsilon,
            time_s=self.clock.now(),
        )
        await self._announce(event, task.job)

    async def _aggregate(self, task: Aggregate) -> None:
        updates, refused = await self._exchange.take(task)
        start = await self._stored(task.adapter, task.parent)
        if start is None:
            start = await asyncio.to_thread(self.trainer.fresh, task.hyper, task.seed)
        state = await self._exchange.state(task)
        plan = Plan(
            task.strategy, task.hyper.rank, task.hyper.alpha / task.hyper.rank, task.steps or math.inf, task.rates
        )
        result = await asyncio.to_thread(aggregate, plan, start, updates, state, refused)
        await self._exchange.store(task, result.tensors, result.state)
        event = Aggregated(
            job=task.job,
            round=task.round,
            adapter=task.adapter,
            version=task.version,
            residual=result.residual,
            refused={client: reason[:MAX_REASON] for client, reason in result.refused.items()},
            time_s=self.clock.now(),
        )
        await self._announce(event, task.job)

    async def _measure(self, adapter: str, version: int, hyper: messages.Hyperparams) -> Quality:
        """Held-out cross-entropy of a version on this replica's data, measured once as long as the data stay.

        The last few versions are remembered: a round asks for its start, its candidate, and the base model.
        """
        await self._refresh_data(hyper)
        if (adapter, version) not in self._measured:
            tensors = await self._stored(adapter, version)
            quality = await asyncio.to_thread(self.trainer.evaluate_stored, tensors, hyper)
            self.progress += 1
            self._measured[adapter, version] = quality
            if len(self._measured) > MAX_MEASURED:
                del self._measured[next(iter(self._measured))]
        return self._measured[adapter, version]

    async def _stored(self, adapter: str, version: int) -> adapters.Tensors | None:
        """None for version 0, the base model."""
        return (await self._feed.fetch(adapter, version)).tensors if version else None

    async def _refresh_data(self, hyper: messages.Hyperparams) -> None:
        if await asyncio.to_thread(self.trainer.load_data, Path(self.settings.data_dir), hyper):
            self._measured.clear()

    # --- saying

    async def _report(self, task: TrainRound, step: StepReport) -> None:
        report = TrainReport(
            replica=self.settings.id,
            job=task.job,
            round=task.round,
            step=task.first_step + step.step,
            time_s=self.clock.now(),
            sizes=msgspec.structs.replace(task.sizes, train=step.batch, sm_share=self._sm_share),
            step_s=step.micro_step_s,
            samples=step.samples,
            loss=step.loss,
            noise_scale=step.noise_scale,
            memory_bytes=step.peak_bytes,
            memory_limit_bytes=step.limit_bytes,
        )
        await patiently(lambda: post.report(self.redis, self.keys, report), PATIENCE_S)

    async def _announce(self, event: Event, id_: str) -> None:
        await patiently(lambda: self._registry.announce(event, id_), PATIENCE_S)

    async def _set_training(self, batch: int) -> None:
        if batch != self._training_batch:
            self._training_batch = batch
            await self._say(Training(batch=batch, sm_share=self._sm_share))
