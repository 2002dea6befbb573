"""The launcher's loop: telemetry and events in, idle decisions and federated jobs out. One leads, others wait."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection
from functools import partial

import msgspec
from redis.asyncio import Redis

from collm_common.clock import Clock
from collm_common.latency import sizes_of
from collm_common.lease import Lease
from collm_common.messages import AnyMessage, InferenceReport, ReplicaChanged
from collm_common.registry import Registry
from collm_common.streams import Entry, Tail, order
from collm_common.types import ReplicaInfo, ReplicaState
from collm_common.watch import Watch
from collm_launcher.loads import Loads
from collm_launcher.policy import canary, rounds
from collm_launcher.policy.idle import Move
from collm_launcher.policy.job import Action, Job, Phase, Publish
from collm_launcher.settings import LauncherSettings
from collm_launcher.store import JobStore

log = logging.getLogger(__name__)


class Launcher:
    """Keeps nothing that Redis does not have, but the windows of utilisation, which fill again in T ticks."""

    def __init__(self, settings: LauncherSettings, redis: Redis, clock: Clock) -> None:
        self.settings, self.redis, self.clock = settings, redis, clock
        self.keys = settings.keys
        self.stop = asyncio.Event()
        self.ticks = 0
        self.jobs: dict[str, Job] = {}
        self._lease = Lease(redis, self.keys, "launcher", uuid.uuid4().hex[:8], settings.lease_ttl_s)
        self._registry = Registry(redis, self.keys)
        self._store = JobStore(redis, self.keys, self._lease, settings.keep_versions)
        self._watch = Watch(self._lease, clock, settings.tick_s, self._lead, self._hear, self._tick)
        self._replicas: dict[str, ReplicaInfo] = {}
        self._positions: dict[str, str] = {}
        self._start_over()

    @property
    def leads(self) -> bool:
        """Whether this one holds the lease, as far as it knows, and has read what there was."""
        return self._watch.leads

    async def run(self) -> None:
        """Until `stop`. What was decided and not written is decided again from what Redis has."""
        await self._watch.run(self.stop)

    # --- leading

    async def _lead(self) -> Tail:
        self._start_over()
        self.jobs, self._positions = await self._store.jobs()
        tail = Tail(self.redis, self.keys.telemetry, self.keys.events)
        tail.positions[self.keys.events] = min(self._positions.values(), key=order, default="")
        await tail.start()
        self._heard = tail.positions[self.keys.events]
        for model in self.settings.adapters:
            for name in self.settings.adapters_of(model):
                await self._store.adapter(name, model)
                self._next_job_s[name] = await self._store.trained_s(name) + self.settings.cooldown_s
        self._replicas = await self._registry.replicas()
        log.info("leading, with %d jobs to go on with", len(self.jobs))
        return tail

    def _start_over(self) -> None:
        self._loads = Loads(self.settings.idle, self.settings.combined_share)
        self._next_job_s: dict[str, float] = {}
        self._heard = ""

    # --- events

    async def _hear(self, entry: Entry, message: AnyMessage) -> None:
        match message:
            case InferenceReport():
                self._loads.hear(message)
                for job in self.jobs.values():
                    canary.hear(job, message.scored)
            case ReplicaChanged(what="up"):
                await self._catch_up(message.replica)
        if entry.key == self.keys.events:
            self._heard = entry.entry_id
            for job in [*self.jobs.values()]:
                if order(entry.entry_id) > order(self._positions[job.id]):
                    await self._step(job, message)

    async def _step(self, job: Job, message: AnyMessage | None) -> None:
        """Let a job see an event, or the time; write what changed together with what follows from it."""
        before = msgspec.msgpack.encode(job)
        job.sizes.update(await sizes_of(self.redis, self.keys, job.clients))
        now = self.clock.now()
        told = message is not None
        actions = rounds.on_event(job, now, message) if told else rounds.on_tick(job, now, self._usable(job))
        if actions or msgspec.msgpack.encode(job) != before:
            await self._apply(job, actions)

    async def _catch_up(self, replica: str) -> None:
        """A version may have been published after this one read which is current, and before it was known here."""
        self._replicas = await self._registry.replicas()
        info = self._replicas.get(replica)
        for name in self.settings.adapters_of(info.model) if info is not None else ():
            await self._store.remind(replica, name)

    async def _apply(self, job: Job, actions: list[Action]) -> None:
        now = self.clock.now()
        if any(isinstance(action, Publish) for action in actions):
            self._replicas = await self._registry.replicas()
        replicas = [id_ for id_, info in self._replicas.items() if info.model == job.model]
        self._positions[job.id] = max(self._heard, self._positions[job.id], key=order)
        await self._store.apply(job, actions, replicas, self._positions[job.id], now)
        if job.ended:
            log.info("job %s ended: %s after round %d", job.id, job.phase, job.round)
            del self.jobs[job.id], self._positions[job.id]
            self._next_job_s[job.adapter] = now + self.settings.cooldown_s

    # --- ticks

    async def _tick(self, now: float) -> None:
        self.ticks += 1
        self._replicas = await self._registry.replicas()
        paused = await self._store.paused()
        for job in [*self.jobs.values()]:
            await self._step(job, None)
            if not job.ended and await self._store.cancelled(job):
                await self._apply(job, rounds.cancel(job, now))
            elif actions := rounds.pause(job, now) if job.id in paused else rounds.resume(job, now):
                await self._apply(job, actions)
        await self._free_strays(now)
        self._loads.tick(self._replicas, await sizes_of(self.redis, self.keys, self._replicas))
        for model in sorted({info.model for info in self._replicas.values()}):
            wanted = {name: id_ for name, id_ in (await self._store.wanted(model)).items() if id_ not in paused}
            adapter = self._due(model, wanted, now)
            start_from = None if adapter is None else self.settings.rules.min_clients
            able = partial(rounds.able, rules=self.settings.rules)
            for move in self._loads.moves(model, self._replicas, start_from, able):
                # Idle offers a replica to a job: where none can come, it would only be kept from its requests.
                if adapter is not None or move.after is not ReplicaState.IDLE:
                    await self._move(move, now)
            if adapter is not None:
                await self._start_job(model, adapter, wanted.get(adapter), now)

    def _usable(self, job: Job) -> set[str]:
        """Clients that live and are still this job's: Combined once they joined."""
        usable = set()
        for id_, client in job.clients.items():
            info = self._replicas.get(id_)
            if info is None or not info.alive:
                continue
            if info.state is ReplicaState.COMBINED or (info.state is ReplicaState.IDLE and not client.joined):
                usable.add(id_)
        return usable

    async def _free_strays(self, now: float) -> None:
        """A replica whose job is gone, or that is not its client any more, is free and serves."""
        members = {id_ for job in self.jobs.values() for id_ in job.clients}
        for id_, info in self._replicas.items():
            if id_ in members:
                continue
            if info.job:
                await self._registry.update(id_, job="")
            if info.state is ReplicaState.COMBINED:
                await self._move(Move(id_, info.state, ReplicaState.SERVING, "it has no job"), now)

    def _due(self, model: str, wanted: Collection[str], now: float) -> str | None:
        """The adapter of a model that a job may train now: of those that rest and are in no job, the one first free.

        What clients want trained comes first.
        """
        able = sum(info.model == model and rounds.able(info, self.settings.rules) for info in self._replicas.values())
        if able < self.settings.rules.min_clients:
            return None
        busy = {job.adapter for job in self.jobs.values() if job.phase is not Phase.WAITING}
        waited = {name: self._next_job_s.get(name, 0.0) for name in (*wanted, *self.settings.adapters_of(model))}
        ready = [name for name, free_s in waited.items() if free_s <= now and name not in busy]
        return min(ready, key=lambda name: (name not in wanted, waited[name]), default=None)

    async def _start_job(self, model: str, adapter: str, wanted: str | None, now: float) -> None:
        """`wanted` is the id of a job that a client has asked for."""
        since = await self._store.last_event()
        self._replicas = await self._registry.replicas()
        here = [info for info in self._replicas.values() if info.model == model]
        members = rounds.choose(here, self.settings.rules)
        if not members:
            return
        version, following = await self._store.adapter(adapter, model)
        id_ = wanted or uuid.uuid4().hex[:8]
        if (job := self.jobs.get(id_)) is not None:
            job.version, job.next_version = version, max(job.next_version, following)
            actions = rounds.form(job, now, members)
        else:
            job, actions = rounds.start(
                id_, now, members, adapter, version, following, self.settings.rules, self.settings.seed
            )
            job.wanted = wanted is not None
            self.jobs[id_], self._positions[id_] = job, since
        log.info("job %s over %s", id_, ", ".join(job.clients))
        await self._apply(job, actions)

    async def _move(self, move: Move, now: float) -> None:
        if await self._registry.transition(move.replica, move.before, move.after, move.reason, now):
            self._loads.moved(move)
            log.info("%s: %s -> %s: %s", move.replica, move.before, move.after, move.reason)
