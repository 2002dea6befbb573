"""The coordinator: makes a job's clients Combined, fits their latencies, sends batch sizes that keep the SLO."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping

from redis.asyncio import Redis

from collm_common import latency, post
from collm_common.clock import Clock
from collm_common.errors import MessageError
from collm_common.latency import LatencyModel
from collm_common.lease import Lease
from collm_common.messages import (
    AnyMessage,
    Configure,
    InferenceReport,
    JobChanged,
    ReplicaChanged,
    StateChanged,
    TrainReport,
    UpdateUploaded,
)
from collm_common.registry import Registry
from collm_common.streams import Entry, Tail
from collm_common.types import BatchSizes, ReplicaInfo, ReplicaState
from collm_common.watch import Watch
from collm_coordinator.replica_model import ReplicaModel
from collm_coordinator.settings import CoordinatorSettings
from collm_coordinator.solver import Choice, Demand, Learning, first_draw, keeps_slo, solve

log = logging.getLogger(__name__)


class Coordinator:
    """One leads, others wait. What it knows is measured again within seconds after a restart."""

    def __init__(self, settings: CoordinatorSettings, redis: Redis, clock: Clock) -> None:
        self.settings, self.redis, self.clock, self.keys = settings, redis, clock, settings.keys
        self.stop = asyncio.Event()
        self.models: dict[str, ReplicaModel] = {}
        self._lease = Lease(redis, self.keys, "coordinator", uuid.uuid4().hex[:8], settings.lease_ttl_s)
        self._registry = Registry(redis, self.keys)
        self._watch = Watch(self._lease, clock, settings.fit_s, self._lead, self._hear, self._look_around)

    @property
    def leads(self) -> bool:
        """Whether this one holds the lease, as far as it knows, and has read what there was."""
        return self._watch.leads

    async def run(self) -> None:
        """Until `stop`. What no event told is found again where jobs and states are looked at anew."""
        await self._watch.run(self.stop)

    async def _lead(self) -> Tail:
        tail = Tail(self.redis, self.keys.telemetry, self.keys.events)
        await tail.start()
        await self._join_waiting()
        log.info("leading")
        return tail

    async def _hear(self, _: Entry, message: AnyMessage) -> None:
        match message:
            case InferenceReport():
                self._model(message.replica).observe_inference(message)
            case TrainReport():
                self._model(message.replica).observe_training(message)
            case JobChanged(status="forming"):
                await self._join(message.job)
            case UpdateUploaded():
                await self._settle(message.replica)
            case StateChanged(before=ReplicaState.COMBINED):
                await self._restore(message.replica, f"{message.after}: {message.reason}")
            case ReplicaChanged(what="up"):
                await self._remind(message.replica)

    def _model(self, replica: str) -> ReplicaModel:
        return self.models.setdefault(replica, ReplicaModel())

    # --- jobs

    async def _join_waiting(self) -> None:
        """Jobs whose event nobody could hear: nobody led, or the entry was damaged."""
        for name in await self.redis.smembers(self.keys.jobs):
            await self._join(name.decode())

    async def _join(self, job: str) -> None:
        status, clients = await self.redis.hmget(self.keys.job(job), ["status", "clients"])
        if status != b"forming" or not clients:
            return
        replicas = await self._registry.replicas()
        for id_ in clients.decode().split(","):
            info = replicas.get(id_)
            if info is None or info.state is not ReplicaState.IDLE:
                continue
            sizes = self._first_sizes(job, info)
            await self._configure(id_, sizes, f"first sizes for job {job}")
            now = self.clock.now()
            await self._registry.transition(id_, ReplicaState.IDLE, ReplicaState.COMBINED, f"job {job} starts", now)

    def _first_sizes(self, job: str, info: ReplicaInfo) -> BatchSizes:
        settings = self.settings
        drawn = first_draw(f"{settings.seed} {job} {info.id}", settings.first_train_max, info.infer_batch_max)
        model = self._model(info.id)
        model.first_batch = drawn.train
        return drawn

    # --- fits

    async def _look_around(self, _: float) -> None:
        """Fit whoever has new samples, forget replicas that are gone, and act on what no event told."""
        replicas = await self._registry.replicas()
        for id_ in [id_ for id_ in self.models if id_ not in replicas]:
            del self.models[id_]
        await self._restore_strays(replicas)
        await self._join_waiting()
        for info in replicas.values():
            # Fits take milliseconds each: with many replicas the lease would run out meanwhile.
            if await self._lease.hold() is None:
                return
            if info.alive and info.id in self.models:
                await self._refit(info, replicas, settle=False)

    async def _settle(self, replica: str) -> None:
        """A round is over: the sizes of the next one."""
        replicas = await self._registry.replicas()
        if replica in replicas:
            await self._refit(replicas[replica], replicas, settle=True)

    async def _refit(self, info: ReplicaInfo, replicas: Mapping[str, ReplicaInfo], settle: bool) -> None:
        model, combined = self._model(info.id), info.state is ReplicaState.COMBINED
        like = (info.model, info.base_digest)
        peers = [self._model(id_) for id_, peer in replicas.items() if (peer.model, peer.base_digest) == like]
        before = model.latency
        if (refusal := model.refit(combined, peers)) is not None:
            log.debug("%s: no new fit: %s", info.id, refusal.reason)
        if model.latency is None:
            return
        if model.latency is not before:
            await latency.save(self.redis, self.keys, info.id, model.latency)
        if combined and model.latency.train is not None:
            await self._choose(info, model, model.latency, settle)

    async def _choose(self, info: ReplicaInfo, model: ReplicaModel, fitted: LatencyModel, settle: bool) -> None:
        """New sizes between two rounds; inside one only if the present ones do not keep the SLO."""
        known = await self._sizes(info.id)
        if not settle and known is not None and keeps_slo(fitted, known, self._demand(model)):
            return
        choice = self._choice(info, model, fitted, await self._accumulation(info.job))
        if known != choice.sizes:
            reason = f"goodput {choice.goodput:.3g} samples/s" if choice.feasible else "nothing keeps the SLO"
            await self._configure(info.id, choice.sizes, reason)

    async def _accumulation(self, job: str) -> int:
        """Micro-steps that make an optimiser step of this job; 1 where it does not say."""
        said = await self.redis.hget(self.keys.job(job), "accumulation")
        return max(1, int(said)) if said is not None and said.isdigit() else 1

    def _choice(self, info: ReplicaInfo, model: ReplicaModel, fitted: LatencyModel, accumulation: int) -> Choice:
        learning = Learning(max(1, model.first_batch), accumulation, model.noise_scale)
        batches = range(1, self.settings.max_train_batch + 1)
        floor = max(1, round(self.settings.min_infer_share * info.infer_batch_max))
        return solve(fitted, batches, info.infer_batch_max, self._demand(model), learning, floor)

    def _demand(self, model: ReplicaModel) -> Demand:
        return Demand(self.settings.slo, model.traffic.mean_prompt_tokens, model.traffic.queue_s)

    # --- configurations

    async def _sizes(self, replica: str) -> BatchSizes | None:
        """What was chosen last; damaged fields count as none, and are replaced by the next choice."""
        try:
            return await latency.load_sizes(self.redis, self.keys, replica)
        except MessageError as error:
            log.error("%s: %s", replica, error)
            return None

    async def _restore(self, replica: str, reason: str) -> None:
        info = await self._registry.replica(replica)
        if info is None or info.state is ReplicaState.COMBINED:
            return
        whole = BatchSizes(0, info.infer_batch_max)
        if await self._sizes(replica) != whole:
            await self._configure(replica, whole, reason)

    async def _restore_strays(self, replicas: Mapping[str, ReplicaInfo]) -> None:
        """Replicas that left a job while nobody led."""
        for info in replicas.values():
            if info.state is ReplicaState.COMBINED:
                continue
            known = await self._sizes(info.id)
            if known is not None and known.train:
                await self._configure(info.id, BatchSizes(0, info.infer_batch_max), f"it is {info.state}")

    async def _remind(self, replica: str) -> None:
        """A new process does not know what its predecessor was told."""
        known = await self._sizes(replica)
        if known is not None:
            await self._command(replica, known)

    async def _configure(self, replica: str, sizes: BatchSizes, reason: str) -> None:
        log.info("%s: B = %d, b = %d: %s", replica, sizes.train, sizes.infer, reason)
        await latency.save_sizes(self.redis, self.keys, replica, sizes, reason)
        await self._command(replica, sizes)

    async def _command(self, replica: str, sizes: BatchSizes) -> None:
        await post.command(self.redis, self.keys, replica, Configure(sizes=sizes), "coordinator")
