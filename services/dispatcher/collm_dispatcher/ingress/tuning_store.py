"""Fine-tuning jobs that clients ask for, in Redis: the launcher runs each as a federated job of the same id."""

from __future__ import annotations

import logging
import uuid
from typing import Any

import msgspec
from msgspec import Struct
from redis.asyncio import Redis

from collm_common import blobs, messages, streams
from collm_common.errors import Conflict, MessageError, RequestError
from collm_common.keys import Keys
from collm_common.messages import Event
from collm_common.types import AdapterManifest

log = logging.getLogger(__name__)
EVENTS_READ = 20_000
STATUS = {"done": "succeeded", "failed": "failed"}


class UnknownJob(RequestError):
    """No client asked for such a job."""

    status = 404
    type = "invalid_request_error"
    code = "job_not_found"


class Tuning(Struct, frozen=True, kw_only=True):
    """One job: what was asked for, and how far it is. `version` is the last one accepted, 0 for none."""

    id: str
    asked: str
    model: str
    adapter: str
    training_file: str
    created_at: int
    metadata: str = "{}"
    status: str = "queued"
    version: int = 0
    finished_at: int | None = None
    reason: str = ""

    @property
    def ended(self) -> bool:
        """Nothing more will happen."""
        return self.status in ("succeeded", "failed", "cancelled")


class TuningStore:
    """The launcher forgets an ended job after a day; what became of it is kept here when it is first looked at."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys

    async def create(self, asked: str, model: str, adapter: str, file: str, metadata: str, now: int) -> Tuning:
        """Queue a job; `adapter` "" is named after it. Raises Conflict while another job of the adapter is wanted."""
        id_ = f"ftjob-{uuid.uuid4().hex[:24]}"
        name = adapter or id_
        made = Tuning(
            id=id_, asked=asked, model=model, adapter=name, training_file=file, created_at=now, metadata=metadata
        )
        if not await self._redis.hsetnx(self._keys.wanted(model), name, id_):
            raise Conflict(f"a job of {name} waits or runs already", param="suffix")
        await self._keep(made)
        return made

    async def find(self, id_: str) -> Tuning:
        """Raises UnknownJob."""
        row = await self._redis.hget(self._keys.tuning(id_), "state")
        if row is None:
            raise UnknownJob(f"no job {id_[:80]!r}", param="id")
        known = msgspec.json.decode(row, type=Tuning)
        if known.ended:
            return known
        now = await self._now(known)
        if now.ended:
            await self._keep(now)
        return now

    async def cancel(self, known: Tuning) -> Tuning:
        """End it, now or as soon as the launcher sees it; one that has ended stays as it is."""
        if known.ended:
            return known
        ended = msgspec.structs.replace(known, status="cancelled")
        async with self._redis.pipeline(transaction=True) as pipe:
            if known.status == "running":
                pipe.hset(self._keys.job(known.id), "cancel", 1)
            else:
                pipe.hdel(self._keys.wanted(known.model), known.adapter)
            await pipe.execute()
        await self._keep(ended)
        return ended

    async def events(self, id_: str) -> list[tuple[str, Event]]:
        """What was said about the job, newest first, as far as the event stream remembers."""
        found: list[tuple[str, Event]] = []
        for entry in streams.parse("", await self._redis.xrevrange(self._keys.events, count=EVENTS_READ)):
            try:
                message: Any = messages.decode(entry.data)
            except MessageError:
                continue
            if getattr(message, "job", None) == id_:
                found.append((entry.entry_id, message))
        return found

    async def versions(self, known: Tuning) -> list[int]:
        """The published versions that the job made and that are still stored, newest first."""
        row = await self._redis.hget(self._keys.adapter(known.adapter), "published")
        made = []
        for version in sorted({int(text) for text in (row or b"").decode().split(",") if text.isdigit()}, reverse=True):
            meta = await blobs.meta(self._redis, self._keys.adapter_version(known.adapter, version))
            if _made_by(meta) == known.id:
                made.append(version)
        return made

    async def _now(self, known: Tuning) -> Tuning:
        keys = self._keys
        phase, version = await self._redis.hmget(keys.job(known.id), ["status", "version"])
        if phase is None:
            if await self._redis.hget(keys.wanted(known.model), known.adapter) == known.id.encode():
                return known
            return msgspec.structs.replace(known, status="failed", reason="what became of it was not kept")
        status = STATUS.get(phase.decode(), "running")
        ended_s = (
            await self._redis.hget(keys.adapter(known.adapter), "trained_s") if status in STATUS.values() else None
        )
        return msgspec.structs.replace(
            known,
            status=status,
            version=int(version or 0),
            finished_at=round(float(ended_s)) if ended_s is not None else None,
            reason="no round was accepted" if status == "failed" else "",
        )

    async def _keep(self, made: Tuning) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._keys.tuning(made.id), "state", msgspec.json.encode(made))
            pipe.zadd(self._keys.tunings, {made.id: made.created_at})
            await pipe.execute()


def _made_by(meta: bytes | None) -> str:
    """The job in a version's manifest; "" if it is gone or damaged."""
    try:
        return msgspec.msgpack.decode(meta or b"", type=AdapterManifest).job
    except msgspec.DecodeError as error:
        log.error("a manifest cannot be read: %s", error)
        return ""
