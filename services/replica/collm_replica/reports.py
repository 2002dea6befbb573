"""The inference process reports on itself: what its engine did, every `report_s` seconds, into telemetry."""

from __future__ import annotations

import os

from redis.asyncio import Redis

from collm_common import post
from collm_common.broker import AWAY
from collm_common.clock import Clock, ticks
from collm_common.messages import Answered, Delta, Done, Failed, InferenceReport, Request
from collm_common.registry import Registry
from collm_common.trouble import TROUBLES
from collm_common.types import BatchSizes
from collm_replica.channel import Training
from collm_replica.engine.protocol import InferenceEngine, StepResult
from collm_replica.mps import PIPES
from collm_replica.outbox import Open
from collm_replica.settings import ReplicaSettings
from collm_replica.telemetry import OwnWork, Utilisation, Window
from collm_replica.versions import Versions

MAX_ANSWERED = 64


class Reports:
    """`training` is what the fine-tuning process runs right now."""

    def __init__(
        self,
        settings: ReplicaSettings,
        redis: Redis,
        engine: InferenceEngine,
        versions: Versions,
        utilisation: Utilisation,
        clock: Clock,
    ) -> None:
        self._settings, self._redis, self._clock = settings, redis, clock
        self._engine, self._versions, self._utilisation = engine, versions, utilisation
        self._registry = Registry(redis, settings.keys)
        self._own_work = OwnWork(utilisation)
        self._window = Window(clock.monotonic())
        self.training = Training(batch=0)

    def count(self, result: StepResult) -> None:
        """Account for one step."""
        beside = BatchSizes(self.training.batch, max(1, result.running), self.training.sm_share)
        self._window.step(beside, result.running, result.prefill_tokens, result.duration_s)
        self._window.output_tokens += sum(len(reply.tokens) for reply in result.replies if isinstance(reply, Delta))
        self._window.finished += sum(isinstance(reply, Done | Failed) for reply in result.replies)

    def admitted(self, request: Request) -> None:
        """Account for a request that came in; what came here before from elsewhere says nothing about the wait."""
        if request.attempt == 0:
            self._window.admit(request.slo, self._clock.now() - request.arrival_s)

    def answered(self, open_: Open, done: Done) -> None:
        """Account for a whole answer; some of many tell as much as all."""
        if open_.adapter is not None and done.quality is not None:
            self._window.score(open_.adapter, done.quality)
        if len(self._window.answered) < MAX_ANSWERED:
            times = done.first_s, done.token_s
            answered = Answered(open_.slo, done.output_tokens, *times, done.expected, done.cached_tokens)
            self._window.answered.append(answered)

    async def run(self) -> None:
        """For ever. A report that cannot be sent is lost."""
        async for now in ticks(self._settings.report_s, self._clock):
            try:
                await self._report(now)
            except AWAY as error:
                TROUBLES.tell("telemetry", error)

    async def _report(self, now: float) -> None:
        info = await self._registry.replica(self._settings.id)
        if info is None:
            return
        window, self._window = self._window, Window(self._clock.monotonic())
        busy, mean_batch = window.fractions(self._window.start_s)
        beside_training = self.training.batch > 0 or any(sizes.train for sizes in window.iterations)
        mps = PIPES in os.environ
        report = InferenceReport(
            replica=self._settings.id,
            state=info.state,
            time_s=now,
            utilisation=self._own_work.read(busy, beside_training),
            memory_bytes=self._utilisation.memory_bytes(),
            queue=self._engine.waiting,
            running=self._engine.running,
            mean_batch=mean_batch,
            limit=self._engine.limit,
            train_batch=self.training.batch,
            iterations=window.samples(),
            prefill_tokens=window.prefill_tokens,
            prefill_s=window.prefill_s,
            kv_usage=self._engine.kv_usage,
            preemptions=self._engine.preemptions,
            output_tokens=window.output_tokens,
            finished=window.finished,
            snapshots=self._versions.snapshots,
            published=self._versions.published,
            served=window.admitted(),
            answered=tuple(window.answered),
            scored=window.scores(),
            sm_shares=self._settings.sm_shares if mps else (),
            mps=mps,
            versions={name: ref.version for name, ref in self._engine.versions.items()},
        )
        await post.report(self._redis, self._settings.keys, report)
