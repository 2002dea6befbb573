"""Jobs in Redis: whatever a decision asks for, and the job's new state, in one fenced transaction."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Sequence

import msgspec
from redis.asyncio import Redis
from redis.exceptions import WatchError

from collm_common import post
from collm_common.errors import FencedError
from collm_common.keys import Keys
from collm_common.lease import Lease
from collm_common.lineage import numbers
from collm_common.messages import LoadAdapter
from collm_common.trouble import contained, written
from collm_launcher.policy.job import Action, Job
from collm_launcher.transaction import Stored, Transaction

log = logging.getLogger(__name__)


class JobStore:
    """Writes only while `lease` is held: a stale leader's transaction raises FencedError and changes nothing."""

    def __init__(self, redis: Redis, keys: Keys, lease: Lease, keep_versions: int) -> None:
        self._redis, self._keys, self._lease, self._keep = redis, keys, lease, keep_versions

    async def jobs(self) -> tuple[dict[str, Job], dict[str, str]]:
        """Jobs that have not ended, and for each the last event that its state has seen.

        One whose state cannot be read is given up: its replicas are free.
        """
        found: dict[str, Job] = {}
        positions: dict[str, str] = {}
        for id_ in sorted(written(self._keys.jobs, await self._redis.smembers(self._keys.jobs))):
            key = self._keys.job(id_)
            state, position = b"", b""
            with contained(key):
                state, position = await self._redis.hmget(key, ["state", "position"])
            try:
                found[id_] = msgspec.msgpack.decode(state or b"", type=Job)
                positions[id_] = (position or b"").decode()
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                found.pop(id_, None)
                log.error("giving up job %s: its state cannot be read: %s", id_, error)
                await self._redis.srem(self._keys.jobs, id_)
        return found, positions

    async def last_event(self) -> str:
        """The id of the newest event; `0-0` if there was none."""
        rows = await self._redis.xrevrange(self._keys.events, count=1)
        return rows[0][0].decode() if rows else "0-0"

    async def adapter(self, name: str, model: str) -> tuple[int, int]:
        """(current version, next free version) of an adapter, which is made at version 0 if it is new."""
        key = self._keys.adapter(name)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hsetnx(key, "version", 0)
            pipe.hsetnx(key, "model", model)
            pipe.sadd(self._keys.adapters, name)
            pipe.hmget(key, ["version", "last"])
            version, last = (await pipe.execute())[-1]
        current = int(_number(version))
        following = max(current, int(_number(last))) + 1
        while await self._redis.exists(self._keys.adapter_version(name, following)):
            following += 1
        return current, following

    async def trained_s(self, name: str) -> float:
        """When the adapter's last job ended, Unix seconds; 0 if none did."""
        return _number(await self._redis.hget(self._keys.adapter(name), "trained_s"))

    async def wanted(self, model: str) -> dict[str, str]:
        """Adapters that clients want trained, with the id that each one's job shall have."""
        rows = await self._redis.hgetall(self._keys.wanted(model))
        return {name.decode(errors="replace"): id_.decode(errors="replace") for name, id_ in rows.items()}

    async def paused(self) -> set[str]:
        """The jobs that clients want to rest."""
        return {id_.decode(errors="replace") for id_ in await self._redis.smembers(self._keys.paused)}

    async def cancelled(self, job: Job) -> bool:
        """Whether a client wants the job to end now, or gave it up at the moment when it started."""
        if await self._redis.hexists(self._keys.job(job.id), "cancel"):
            return True
        return job.wanted and await self._redis.hget(self._keys.wanted(job.model), job.adapter) != job.id.encode()

    async def remind(self, replica: str, name: str) -> None:
        """Tell a replica the current version. One that is published at this moment is told by whoever publishes it."""
        key = self._keys.adapter(name)
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(key)
            version = int(await pipe.hget(key, "version") or 0)
            if version == 0:
                return
            pipe.multi()
            post.queue_command(pipe, self._keys, replica, LoadAdapter(name=name, version=version), name)
            with contextlib.suppress(WatchError):
                await pipe.execute()

    async def apply(
        self, job: Job, actions: Sequence[Action], replicas: Collection[str], position: str, now: float
    ) -> None:
        """All or nothing. `replicas` are those of the job's model, `position` is the last event it has seen."""
        async with self._redis.pipeline(transaction=True) as pipe:
            await pipe.watch(self._lease.key, self._keys.adapter(job.adapter))
            held = await pipe.get(self._lease.key)
            if self._lease.token is None or held != self._lease.token.encode():
                raise FencedError(f"another launcher leads; job {job.id} is left to it")
            rows = await pipe.hmget(self._keys.adapter(job.adapter), ["version", "published"])
            stored = Stored(int(_number(rows[0])), numbers(rows[1]), self._keep)
            pipe.multi()
            transaction = Transaction(pipe, self._keys, job, replicas, stored, now)
            for action in actions:
                transaction.add(action)
            transaction.write_state(position)
            try:
                await pipe.execute()
            except WatchError as error:
                raise FencedError("the launcher's lease changed hands, or the adapter was rolled back") from error


def _number(value: bytes | None) -> float:
    """0 for a field that is not there, or that somebody damaged: versions in Redis are found by their keys."""
    try:
        return float(value or 0)
    except ValueError:
        log.error("taking the damaged field %r for 0", value)
        return 0.0
