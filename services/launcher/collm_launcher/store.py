"""Jobs in Redis: whatever a decision asks for, and the job's new state, in one fenced transaction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from collm_common import messages, streams
from collm_common.errors import FencedError
from collm_common.keys import Keys
from collm_common.lease import Lease
from collm_common.messages import AdapterPublished, Aggregate, Event, LoadAdapter, StateChanged
from collm_common.registry import EVENTS_MAXLEN
from collm_common.scripts import TRANSITION
from collm_common.types import ReplicaInfo, ReplicaState
from redis.asyncio import Redis
from redis.exceptions import WatchError

from collm_launcher.policy.job import Action, Announce, Clean, Job, Publish, Return, Score, Send

CONTROL_MAXLEN = 1000
KEEP_ENDED_S = 24 * 3600


class JobStore:
    """Writes only while `lease` is held: a stale leader's transaction raises FencedError and changes nothing."""

    def __init__(self, redis: Redis, keys: Keys, lease: Lease, keep_versions: int) -> None:
        self._redis, self._keys, self._lease, self._keep = redis, keys, lease, keep_versions

    async def jobs(self) -> tuple[dict[str, Job], str]:
        """Jobs that have not ended, and the event after which all of them have seen everything ("" without jobs)."""
        found: dict[str, Job] = {}
        positions: list[str] = []
        for id_ in sorted(name.decode() for name in await self._redis.smembers(self._keys.jobs)):
            state, position = await self._redis.hmget(self._keys.job(id_), ["state", "position"])
            if state is not None and position is not None:
                found[id_] = msgspec.msgpack.decode(state, type=Job)
                positions.append(position.decode())
        return found, min(positions, key=_entry_order, default="")

    async def adapter(self, name: str, model: str) -> tuple[int, int]:
        """(current version, next free version) of an adapter, which is made at version 0 if it is new."""
        key = self._keys.adapter(name)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hsetnx(key, "version", 0)
            pipe.hsetnx(key, "model", model)
            pipe.sadd(self._keys.adapters, name)
            pipe.hmget(key, ["version", "last"])
            version, last = (await pipe.execute())[-1]
        return int(version), max(int(version), int(last or 0)) + 1

    async def apply(
        self, job: Job, actions: Sequence[Action], replicas: Collection[ReplicaInfo], position: str, now: float
    ) -> None:
        """All or nothing. `replicas` are those of the job's model, `position` the last event it has seen."""
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(self._lease.key)
            held = await pipe.get(self._lease.key)
            if self._lease.token is None or held is None or held.decode() != self._lease.token:
                raise FencedError(f"another launcher leads; job {job.id} is left to it")
            pipe.multi()
            for action in actions:
                self._queue(pipe, job, action, replicas, now)
            self._queue_state(pipe, job, position)
            try:
                await pipe.execute()
            except WatchError as error:
                raise FencedError("the launcher's lease changed hands") from error

    def _queue(self, pipe: Any, job: Job, action: Action, replicas: Collection[ReplicaInfo], now: float) -> None:
        match action:
            case Send(replica, command):
                self._queue_command(pipe, replica, job, command)
                if isinstance(command, Aggregate):
                    pipe.hset(self._keys.adapter(job.adapter), "last", command.version)
            case Announce(event):
                self._queue_event(pipe, event, job.id)
            case Return(replica, before, reason):
                pipe.hset(self._keys.replica(replica), "job", "")
                self._queue_return(pipe, replica, before, reason, now)
            case Score(replica, quality):
                pipe.hset(self._keys.replica(replica), "quality", quality)
            case Clean(round_, clients):
                pipe.delete(*(self._keys.update(job.id, round_, client) for client in clients))
            case Publish(version, before_loss, after_loss):
                self._queue_publication(pipe, job, version, replicas)
                published = AdapterPublished(
                    name=job.adapter, version=version, before=before_loss, after=after_loss, time_s=now
                )
                self._queue_event(pipe, published, job.adapter)

    def _queue_command(self, pipe: Any, replica: str, job: Job, command: messages.Control) -> None:
        entry = streams.fields(messages.kind(command), job.id, messages.encode(command))
        pipe.xadd(self._keys.control(replica), entry, maxlen=CONTROL_MAXLEN, approximate=True)

    def _queue_event(self, pipe: Any, event: Event, id_: str) -> None:
        entry = streams.fields(messages.kind(event), id_, messages.encode(event))
        pipe.xadd(self._keys.events, entry, maxlen=EVENTS_MAXLEN, approximate=True)

    def _queue_return(self, pipe: Any, replica: str, before: ReplicaState, reason: str, now: float) -> None:
        after = ReplicaState.SERVING
        event = StateChanged(replica=replica, before=before, after=after, reason=reason, time_s=now)
        args = (before.value, after.value, replica, messages.encode(event), EVENTS_MAXLEN)
        pipe.eval(TRANSITION, 2, self._keys.replica(replica), self._keys.events, *args)

    def _queue_publication(self, pipe: Any, job: Job, version: int, replicas: Collection[ReplicaInfo]) -> None:
        pipe.hset(self._keys.adapter(job.adapter), "version", version)
        for info in replicas:
            self._queue_command(pipe, info.id, job, LoadAdapter(name=job.adapter, version=version))
        old = range(max(1, version - 2 * self._keep), version - self._keep + 1)
        if len(old):
            pipe.delete(*(self._keys.adapter_version(job.adapter, number) for number in old))

    def _queue_state(self, pipe: Any, job: Job, position: str) -> None:
        key = self._keys.job(job.id)
        readable = {
            "status": job.phase.value,
            "round": job.round,
            "model": job.model,
            "adapter": job.adapter,
            "version": job.version,
            "server": job.server,
            "clients": ",".join(job.clients),
            "accepted": job.accepted,
        }
        pipe.hset(key, mapping={**readable, "position": position, "state": msgspec.msgpack.encode(job)})
        if job.ended:
            pipe.srem(self._keys.jobs, job.id)
            pipe.expire(key, KEEP_ENDED_S)
        else:
            pipe.sadd(self._keys.jobs, job.id)
            for id_ in job.clients:
                pipe.hset(self._keys.replica(id_), "job", job.id)


def _entry_order(entry_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in entry_id.split("-"))
