"""The coordinator: makes a job's clients Combined, fits their latencies, sends batch sizes that keep the SLO."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec
from redis.asyncio import Redis

from collm_common import latency
from collm_common.clock import Clock
from collm_common.latency import LatencyModel
from collm_common.lease import Lease
from collm_common.lookback import queues
from collm_common.messages import (
    AnyMessage,
    InferenceReport,
    JobChanged,
    ReplicaChanged,
    StateChanged,
    TrainReport,
    UpdateUploaded,
)
from collm_common.registry import Registry
from collm_common.streams import Entry, Tail
from collm_common.trouble import contained, written
from collm_common.types import BatchSizes, ReplicaInfo, ReplicaState
from collm_common.watch import Watch
from collm_coordinator.advisor import Member, choose, demand_on, first_sizes, probe, rate_to_carry, slowed
from collm_coordinator.comparison import Comparison
from collm_coordinator.configurations import Configurations
from collm_coordinator.metrics import Metrics
from collm_coordinator.probing import Cell
from collm_coordinator.replica_model import ReplicaModel
from collm_coordinator.settings import CoordinatorSettings
from collm_coordinator.solver import keeps_slo

log = logging.getLogger(__name__)

LEAST_ITERATIONS = 5
"""One stall among fewer is no pace."""

Infos = Mapping[str, ReplicaInfo]


class Coordinator:
    """One leads, others wait. What it knows is measured again within seconds after a restart."""

    def __init__(self, settings: CoordinatorSettings, redis: Redis, clock: Clock) -> None:
        self.settings, self.redis, self.clock, self.keys = settings, redis, clock, settings.keys
        self.stop = asyncio.Event()
        self.models: dict[str, ReplicaModel] = {}
        self.metrics = Metrics()
        self._probed: defaultdict[str, set[Cell]] = defaultdict(set)
        self._lease = Lease(redis, self.keys, "coordinator", uuid.uuid4().hex[:8], settings.lease_ttl_s)
        self._registry = Registry(redis, self.keys)
        self._configurations = Configurations(redis, self.keys, self.metrics)
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
                compared = self._model(message.replica).observe_inference(message)
                self.metrics.compared(message.replica, compared)
                if message.state is ReplicaState.COMBINED:
                    await self._guard(message.replica, compared)
            case TrainReport():
                self.metrics.compared(message.replica, self._model(message.replica).observe_training(message))
                await self._probe(message)
            case JobChanged(status="forming"):
                await self._join(message.job)
            case UpdateUploaded():
                await self._settle(message.replica)
            case StateChanged(before=ReplicaState.COMBINED):
                await self._configurations.restore(message.replica, f"{message.after}: {message.reason}")
            case ReplicaChanged(what="up"):
                await self._configurations.remind(message.replica)

    def _model(self, replica: str) -> ReplicaModel:
        return self.models.setdefault(replica, ReplicaModel())

    # --- jobs

    async def _join_waiting(self) -> None:
        """Jobs whose event nobody could hear: nobody led, or the entry was damaged."""
        for name in written(self.keys.jobs, await self.redis.smembers(self.keys.jobs)):
            await self._join(name)

    async def _join(self, job: str) -> None:
        key = self.keys.job(job)
        status, clients = None, b""
        with contained(key):
            status, clients = await self.redis.hmget(key, ["status", "clients"])
        if status != b"forming" or not clients:
            return
        replicas = await self._registry.replicas()
        ids = clients.decode(errors="replace").split(",")
        joining = {
            id_: msgspec.structs.replace(replicas[id_], state=ReplicaState.COMBINED, job=job)
            for id_ in ids
            if id_ in replicas and replicas[id_].state is ReplicaState.IDLE
        }
        for number, info in enumerate(joining.values()):
            sizes = await self._first_sizes(job, info, {**replicas, **joining}, number)
            await self._configure(info.id, sizes, f"first sizes for job {job}")
            now = self.clock.now()
            await self._registry.transition(info.id, ReplicaState.IDLE, ReplicaState.COMBINED, f"job {job} starts", now)

    async def _first_sizes(self, job: str, info: ReplicaInfo, replicas: Infos, number: int) -> BatchSizes:
        settings, member = self.settings, await self._member(info)
        if settings.fixed is not None:
            return settings.fixed
        rate = await self._rate_to_carry(info, replicas)
        seed = f"{settings.seed} {job} {info.id}"
        sizes = first_sizes(seed, member, settings.rules, rate, settings.first_train_max, number)
        member.model.progress.start(job, sizes.train)
        return sizes

    # --- probes

    async def _probe(self, report: TrainReport) -> None:
        """In a job's first round, and until the law is told: another B after every few steps."""
        model, steps = self._model(report.replica), self.settings.probe_steps
        if not steps or self.settings.fixed is not None or model.progress.steps < steps:
            return
        law = model.laws.get(model.share)
        if report.round > 1 and law is not None and law.infer.train_identified:
            return
        replicas = await self._registry.replicas()
        info, asked = replicas.get(report.replica), self._probed[report.job]
        sizes = await self._configurations.sizes(report.replica)
        if info is None or info.state is not ReplicaState.COMBINED or sizes is None:
            return
        found = probe(model, self._peers(info, replicas), asked, self.settings.rules)
        model.progress.steps = 0
        if found is None:
            return
        asked.add((found.sizes.train, found.sizes.infer))
        if found.sizes.train != sizes.train:
            await self._configure(
                info.id, msgspec.structs.replace(sizes, train=found.sizes.train), f"probe: {found.reason}"
            )

    # --- fits

    async def _look_around(self, _: float) -> None:
        """Fit whoever has new samples, forget what is gone, and act on what no event told."""
        replicas = await self._registry.replicas()
        for id_ in [id_ for id_ in self.models if id_ not in replicas]:
            del self.models[id_]
            self.metrics.forget(id_)
        jobs = set(written(self.keys.jobs, await self.redis.smembers(self.keys.jobs)))
        for job in [job for job in self._probed if job not in jobs]:
            del self._probed[job]
        await self._configurations.restore_strays(replicas)
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

    async def _refit(self, info: ReplicaInfo, replicas: Infos, settle: bool) -> None:
        model = self._model(info.id)
        before = model.latency
        if (refusal := model.refit(self._peers(info, replicas))) is not None:
            log.debug("%s: no new fit: %s", info.id, refusal.reason)
            self.metrics.refused.labels(info.id).inc()
        law = model.latency
        if law is None:
            return
        if law != before:
            await latency.save(self.redis, self.keys, info.id, law)
            self.metrics.fitted(info.id, law)
        if info.state is ReplicaState.COMBINED and law.train is not None:
            await self._choose(info, replicas, law, settle)

    def _peers(self, info: ReplicaInfo, replicas: Infos) -> Sequence[ReplicaModel]:
        """Replicas with the same weights, itself among them."""
        like = (info.model, info.base_digest)
        return [self._model(id_) for id_, peer in replicas.items() if (peer.model, peer.base_digest) == like]

    # --- choices

    async def _choose(self, info: ReplicaInfo, replicas: Infos, law: LatencyModel, settle: bool) -> None:
        """New sizes between two rounds; inside one only if the present ones do not keep the SLO."""
        known = await self._configurations.sizes(info.id)
        demand = demand_on(self._model(info.id), law, self.settings.rules)
        if not settle and known is not None and keeps_slo(law, known, demand):
            return
        await self._decide(info, replicas, law, known, within_round=not settle)

    async def _guard(self, replica: str, compared: Sequence[Comparison]) -> None:
        """The SLO is in danger if the present sizes break it at the pace that was just measured: act at once."""
        model = self._model(replica)
        law = model.latency
        if law is None or law.train is None:
            return
        beside = (one for one in compared if one.part == "infer" and one.count >= LEAST_ITERATIONS)
        ratio = max([1.0, *(one.ratio for one in beside)])
        pace = slowed(law, ratio)
        known = await self._configurations.sizes(replica)
        if known is None or not known.train or keeps_slo(pace, known, demand_on(model, pace, self.settings.rules)):
            return
        replicas = await self._registry.replicas()
        info = replicas.get(replica)
        if info is not None and info.state is ReplicaState.COMBINED:
            why = f"SLO in danger, iterations take {ratio:.2f} of the law: "
            await self._decide(info, replicas, pace, known, within_round=True, why=why)

    async def _decide(
        self,
        info: ReplicaInfo,
        replicas: Infos,
        law: LatencyModel,
        known: BatchSizes | None,
        within_round: bool,
        why: str = "",
    ) -> None:
        """Solve, and tell the replica if it is to change."""
        rules = self.settings.rules
        if self.settings.fixed is not None:
            return
        member = await self._member(info)
        rate = await self._rate_to_carry(info, replicas)
        choice = choose(member, law, rules, rate, within_round)
        sizes = choice.sizes
        if within_round and known is not None:
            sizes = msgspec.structs.replace(sizes, sm_share=known.sm_share)
        if sizes == known:
            return
        if why:
            self.metrics.dangers.labels(info.id).inc()
        found = f"goodput {choice.goodput:.3g} samples/s, {choice.rate:.3g} requests/s of {rate:.3g}"
        await self._configure(info.id, sizes, why + (found if choice.feasible else "nothing keeps the SLO"))

    async def _rate_to_carry(self, info: ReplicaInfo, replicas: Infos) -> float:
        members = [await self._member(peer) for peer in replicas.values() if peer.alive and peer.model == info.model]
        return rate_to_carry(info.id, members, await self._backlog(info.model), self.settings.rules)

    async def _member(self, info: ReplicaInfo) -> Member:
        accumulation = await self._accumulation(info.job) if info.job else 1
        return Member(info.id, info.state, info.infer_batch_max, self._model(info.id), accumulation)

    async def _accumulation(self, job: str) -> int:
        """Micro-steps that make an optimiser step of this job; 1 where it does not say."""
        key, said = self.keys.job(job), None
        with contained(key):
            said = await self.redis.hget(key, "accumulation")
        return max(1, int(said)) if said is not None and said.isdigit() else 1

    async def _backlog(self, model: str) -> int:
        """Requests for `model` that no replica has yet."""
        return sum(queue.length for queue in await queues(self.redis, self.keys) if queue.model == model)

    async def _configure(self, replica: str, sizes: BatchSizes, reason: str) -> None:
        self._model(replica).progress.ask(sizes.train)
        await self._configurations.configure(replica, sizes, reason)
