"""The launcher's loop: telemetry and events in, idle decisions and federated jobs out. One leads, others wait."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque

from collm_common import messages
from collm_common.broker import AWAY
from collm_common.clock import Clock
from collm_common.errors import FencedError, MessageError
from collm_common.lease import Lease
from collm_common.messages import InferenceReport
from collm_common.registry import Registry
from collm_common.streams import Entry, Tail
from collm_common.types import BatchSizes, ReplicaInfo, ReplicaState
from redis.asyncio import Redis

from collm_launcher.policy import idle, rounds
from collm_launcher.policy.job import Action, Job
from collm_launcher.settings import LauncherSettings
from collm_launcher.store import JobStore

log = logging.getLogger(__name__)

BATCH = 500
ARRIVALS_KEPT = 60


class Launcher:
    """Keeps nothing that Redis does not have, but the windows of utilisation, which fill again in T ticks."""

    def __init__(self, settings: LauncherSettings, redis: Redis, clock: Clock) -> None:
        self.settings, self.redis, self.clock = settings, redis, clock
        self.keys = settings.keys
        self.stop = asyncio.Event()
        self.jobs: dict[str, Job] = {}
        self._holder = uuid.uuid4().hex[:8]
        self._lease = Lease(redis, self.keys, "launcher", self._holder, settings.lease_ttl_s)
        self._registry = Registry(redis, self.keys)
        self._store = JobStore(redis, self.keys, self._lease, settings.keep_versions)
        self._tail: Tail | None = None
        self._loads: dict[str, idle.Load] = {}
        self._reports: dict[str, list[InferenceReport]] = {}
        self._arrivals: dict[str, deque[float]] = {}
        self._replicas: dict[str, ReplicaInfo] = {}
        self._next_job_s: dict[str, float] = {}

    @property
    def leads(self) -> bool:
        """Whether this one holds the lease, as far as it knows."""
        return self._lease.token is not None

    async def run(self) -> None:
        """Until `stop`. A broker that is away, or a lost lease, costs only the time it lasts."""
        next_tick_s = self.clock.monotonic()
        while not self.stop.is_set():
            try:
                await self._hold()
                if self._tail is not None:
                    wait_s = max(0.01, min(1.0, next_tick_s - self.clock.monotonic()))
                    for entry in await self._tail.read(BATCH, wait_s):
                        await self._hear(entry)
                if self.clock.monotonic() >= next_tick_s:
                    next_tick_s = max(next_tick_s + self.settings.tick_s, self.clock.monotonic())
                    if self._tail is not None:
                        await self._tick(self.clock.now())
            except FencedError as error:
                log.warning("%s", error)
                self._lease.token = None
                self._tail = None
            except AWAY as error:
                log.warning("broker away: %s", error)
                await self.clock.sleep(0.5)
            if self._tail is None:
                await self.clock.sleep(min(self.settings.tick_s, self.settings.lease_ttl_s / 3))
        if self.leads:
            await self._lease.release()

    # --- leading

    async def _hold(self) -> None:
        led = self.leads and self._tail is not None
        if await self._lease.hold() is None:
            self._tail = None
            return
        if led:
            return
        log.info("leading")
        for memory in (self._loads, self._reports, self._arrivals, self._next_job_s):
            memory.clear()
        self.jobs, position = await self._store.jobs()
        events, telemetry = Tail(self.redis, self.keys.events), Tail(self.redis, self.keys.telemetry)
        await events.start(position)
        await telemetry.start()
        self._tail = Tail(self.redis)
        self._tail.positions = {**events.positions, **telemetry.positions}
        for model, name in self.settings.adapters.items():
            await self._store.adapter(name, model)
        self._replicas = await self._registry.replicas()

    async def _hear(self, entry: Entry) -> None:
        try:
            message = messages.decode(entry.data)
        except MessageError as error:
            log.error("skipping entry %s of %s: %s", entry.entry_id, entry.key, error)
            return
        if isinstance(message, InferenceReport):
            self._reports.setdefault(message.replica, []).append(message)
            return
        for job in list(self.jobs.values()):
            await self._refresh_sizes(job)
            actions = rounds.on_event(job, self.clock.now(), message)
            if actions:
                await self._apply(job, actions)

    # --- ticking

    async def _tick(self, now: float) -> None:
        self._replicas = await self._registry.replicas()
        for job in list(self.jobs.values()):
            await self._refresh_sizes(job)
            if actions := rounds.on_tick(job, now, self._usable(job)):
                await self._apply(job, actions)
        await self._free_strays(now)
        self._observe()
        for model in sorted({info.model for info in self._replicas.values()}):
            await self._mark_idle(model, now)
            await self._start_job(model, now)

    def _usable(self, job: Job) -> set[str]:
        """Clients that live and are still this job's: Combined once they joined."""
        found = set()
        for id_, client in job.clients.items():
            info = self._replicas.get(id_)
            if info is None or not info.alive or info.state is ReplicaState.SERVING:
                continue
            if info.state is ReplicaState.COMBINED or not client.joined:
                found.add(id_)
        return found

    async def _free_strays(self, now: float) -> None:
        """A replica that is Combined for a job which is gone serves again."""
        members = {id_ for job in self.jobs.values() for id_ in job.clients}
        for id_, info in self._replicas.items():
            if info.state is ReplicaState.COMBINED and id_ not in members:
                await self._move(idle.Move(id_, info.state, ReplicaState.SERVING, "it has no job"), now)

    def _observe(self) -> None:
        reports, self._reports = self._reports, {}
        arrived: dict[str, float] = {}
        for id_, info in self._replicas.items():
            load = self._loads.setdefault(id_, idle.Load(info.state, info.infer_batch_max))
            load.state, load.capacity = info.state, info.infer_batch_max
            if new := reports.get(id_):
                utilisation = sum(report.utilisation for report in new) / len(new)
                batch = sum(report.mean_batch for report in new) / len(new)
                load.observe(utilisation, batch, 4 * self.settings.idle.window)
                arrived[info.model] = arrived.get(info.model, 0.0) + sum(report.finished for report in new)
        for id_ in [id_ for id_, load in self._loads.items() if id_ not in self._replicas]:
            del self._loads[id_]
        for model, count in arrived.items():
            self._arrivals.setdefault(model, deque(maxlen=ARRIVALS_KEPT)).append(count)

    async def _mark_idle(self, model: str, now: float) -> None:
        loads = {
            id_: self._loads[id_]
            for id_, info in self._replicas.items()
            if info.model == model and info.alive and info.ready
        }
        volatility = idle.burstiness(self._arrivals.get(model, ()))
        for move in idle.decide(loads, self.settings.idle, volatility, self._may_train(model, now)):
            await self._move(move, now)

    def _may_train(self, model: str, now: float) -> bool:
        busy = any(job.model == model for job in self.jobs.values())
        return model in self.settings.adapters and not busy and now >= self._next_job_s.get(model, 0.0)

    async def _start_job(self, model: str, now: float) -> None:
        if not self._may_train(model, now):
            return
        self._replicas = await self._registry.replicas()
        here = [info for info in self._replicas.values() if info.model == model]
        if not (members := rounds.choose(here, self.settings.rules.min_clients)):
            return
        adapter = self.settings.adapters[model]
        version, following = await self._store.adapter(adapter, model)
        id_ = uuid.uuid4().hex[:8]
        job, actions = rounds.start(
            id_, now, members, adapter, version, following, self.settings.rules, self.settings.seed
        )
        log.info("job %s over %s", id_, ", ".join(job.clients))
        self.jobs[id_] = job
        await self._apply(job, actions)

    # --- acting

    async def _apply(self, job: Job, actions: list[Action]) -> None:
        assert self._tail is not None
        replicas = [info for info in self._replicas.values() if info.model == job.model]
        now = self.clock.now()
        await self._store.apply(job, actions, replicas, self._tail.positions[self.keys.events], now)
        if job.ended:
            log.info("job %s ended: %s after round %d", job.id, job.phase, job.round)
            del self.jobs[job.id]
            self._next_job_s[job.model] = now + self.settings.cooldown_s

    async def _move(self, move: idle.Move, now: float) -> None:
        if await self._registry.transition(move.replica, move.before, move.after, move.reason, now):
            log.info("%s: %s -> %s: %s", move.replica, move.before, move.after, move.reason)
            if (load := self._loads.get(move.replica)) is not None:
                load.state = move.after

    async def _refresh_sizes(self, job: Job) -> None:
        for id_ in job.clients:
            train, infer = await self.redis.hmget(self.keys.config(id_), ["train", "infer"])
            if train is not None and infer is not None:
                job.sizes[id_] = BatchSizes(int(train), int(infer))
