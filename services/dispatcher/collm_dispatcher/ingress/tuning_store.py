"""Fine-tuning jobs that clients ask for, in Redis: the launcher runs each as a federated job of the same id."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct
from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.errors import Conflict, InvalidRequest, MessageError, RequestError
from collm_common.keys import Keys
from collm_common.lineage import Turn, numbers, turns
from collm_common.messages import Event
from collm_dispatcher.ingress.listing import Page, legible

EVENTS_READ = 2000
EVENT_ID = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")
STATUS = {"done": "succeeded", "failed": "failed", "paused": "queued", "waiting": "queued"}
ENDS = ("succeeded", "failed", "cancelled")

CREATE = """
-- KEYS: wanted, tunings, tuning. ARGV: adapter, job, its state, Unix seconds. What may be of a wrong type comes first:
-- a refusal leaves nothing behind.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 1 then return 0 end
redis.call('ZADD', KEYS[2], ARGV[4], ARGV[2])
redis.call('HSET', KEYS[3], 'state', ARGV[3])
return redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
"""

CANCEL = """
-- KEYS: job, wanted, paused, tuning. ARGV: adapter, job, its state. A job that is not there is not made: the launcher
-- gives up one that is wanted no more.
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'cancel', 1)
elseif redis.call('HGET', KEYS[2], ARGV[1]) == ARGV[2] then
  redis.call('HDEL', KEYS[2], ARGV[1])
end
redis.call('SREM', KEYS[3], ARGV[2])
return redis.call('HSET', KEYS[4], 'state', ARGV[3])
"""


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
    tenant: str = ""

    @property
    def ended(self) -> bool:
        """Nothing more will happen."""
        return self.status in ENDS


def new_id() -> str:
    """Of a job."""
    return f"ftjob-{uuid.uuid4().hex[:24]}"


class TuningStore:
    """The launcher forgets an ended job after a day; what became of it is kept here when it is first looked at."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis, self._keys = redis, keys
        self._create, self._cancel = redis.register_script(CREATE), redis.register_script(CANCEL)

    async def create(
        self,
        asked: str,
        model: str,
        adapter: str,
        file: str,
        metadata: str,
        now: int,
        *,
        id_: str = "",
        tenant: str = "",
    ) -> Tuning:
        """Queue a job; `adapter` "" is named after it. Raises Conflict while another job of the adapter is wanted."""
        id_ = id_ or new_id()
        name = adapter or id_
        made = Tuning(
            id=id_,
            asked=asked,
            model=model,
            adapter=name,
            training_file=file,
            created_at=now,
            metadata=metadata,
            tenant=tenant,
        )
        keys = [self._keys.wanted(model), self._keys.tunings(tenant), self._keys.tuning(id_, tenant)]
        if not await self._create(keys=keys, args=[name, id_, msgspec.json.encode(made), now]):
            raise Conflict(f"a job of {name} waits or runs already", param="suffix")
        return made

    async def find(self, id_: str, tenant: str = "") -> Tuning:
        """Raises UnknownJob, also for one of another tenant, Damaged."""
        key = self._keys.tuning(id_, tenant)
        with legible(key):
            row = await self._redis.hget(key, "state")
            if row is None:
                raise UnknownJob(f"no job {id_[:80]!r}", param="id")
            known = msgspec.json.decode(row, type=Tuning)
            msgspec.json.decode(known.metadata, type=dict[str, str])
        if known.ended:
            return known
        with legible(self._keys.job(known.id)):
            now = await self._now(known)
        if now.ended:
            await self._keep(now)
        return now

    async def cancel(self, known: Tuning) -> Tuning:
        """End it, now or as soon as the launcher sees it; one that has ended stays as it is."""
        if known.ended:
            return known
        ended = msgspec.structs.replace(known, status="cancelled")
        keys, id_ = self._keys, known.id
        touched = [keys.job(id_), keys.wanted(known.model), keys.paused, keys.tuning(id_, known.tenant)]
        await self._cancel(keys=touched, args=[known.adapter, id_, msgspec.json.encode(ended)])
        return ended

    async def pause(self, known: Tuning) -> Tuning:
        """Let it rest from the launcher's next tick on: its replicas serve. Raises InvalidRequest once it has ended."""
        if known.ended:
            raise InvalidRequest(f"the job has {known.status}", param="id", code="job_ended")
        await self._redis.sadd(self._keys.paused, known.id)
        found = await self.find(known.id, known.tenant)
        if found.ended:
            await self._redis.srem(self._keys.paused, known.id)
        return found

    async def resume(self, known: Tuning) -> Tuning:
        """Go on from the last accepted version, as soon as replicas are idle. Raises as `pause`."""
        if known.ended:
            raise InvalidRequest(f"the job has {known.status}", param="id", code="job_ended")
        await self._redis.srem(self._keys.paused, known.id)
        return await self.find(known.id, known.tenant)

    async def events(self, known: Tuning, page: Page) -> tuple[list[tuple[str, Event]], bool]:
        """What was said about the job, newest first, as far back as the event stream remembers; whether there is more.

        Raises InvalidRequest if `page` begins behind what is no event.
        """
        if page.after and not EVENT_ID.fullmatch(page.after):
            raise InvalidRequest(f"after: no event {page.after[:80]!r}", param="after")
        found: list[tuple[str, Event]] = []
        first, step = f"{1000 * known.created_at}-0", 1 if page.oldest else -1
        start, end = (first, "+")[::step]
        start = f"({page.after}" if page.after else start
        while len(found) <= page.limit:
            read = self._redis.xrange if page.oldest else self._redis.xrevrange
            rows = await read(self._keys.events, start, end, count=EVENTS_READ)
            found += _about(known.id, rows)
            if len(rows) < EVENTS_READ:
                break
            start = f"({rows[-1][0].decode()}"
        return found[: page.limit], len(found) > page.limit

    async def versions(self, known: Tuning) -> list[Turn]:
        """The published versions that the job made and that are still stored, newest first."""
        stored = numbers(await self._redis.hget(self._keys.adapter(known.adapter), "published"))
        rows = await self._redis.xrange(self._keys.adapter_history(known.adapter))
        made = {turn.version: turn for turn in turns(rows) if turn.job == known.id}
        return [made[version] for version in sorted(made.keys() & set(stored), reverse=True)]

    async def _now(self, known: Tuning) -> Tuning:
        keys = self._keys
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hmget(keys.job(known.id), ["status", "version"])
            pipe.sismember(keys.paused, known.id)
            (phase, version), paused = await pipe.execute()
        if phase is None:
            if await self._redis.hget(keys.wanted(known.model), known.adapter) == known.id.encode():
                return msgspec.structs.replace(known, status="paused" if paused else known.status)
            return msgspec.structs.replace(known, status="failed", reason="what became of it was not kept")
        status = STATUS.get(phase.decode(), "running")
        ended_s = (
            await self._redis.hget(keys.adapter(known.adapter), "trained_s") if status in STATUS.values() else None
        )
        return msgspec.structs.replace(
            known,
            status="paused" if paused and status not in ENDS else status,
            version=int(version or 0),
            finished_at=round(float(ended_s)) if ended_s is not None else None,
            reason="no round was accepted" if status == "failed" else "",
        )

    async def _keep(self, made: Tuning) -> None:
        await self._redis.hset(self._keys.tuning(made.id, made.tenant), "state", msgspec.json.encode(made))


def _about(job: str, rows: streams.Rows) -> Iterator[tuple[str, Event]]:
    for entry in streams.parse("", rows):
        try:
            message: Any = messages.decode(entry.data)
        except MessageError:
            continue
        if getattr(message, "job", None) == job:
            yield entry.entry_id, message
