"""Redis streams, knowing no message: entries of `kind`, `id` and `data`; a work queue and a tail."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from typing import Any

import redis.exceptions as failures
from msgspec import Struct
from redis.asyncio import Redis

from collm_common.broker import BLOCK_S

log = logging.getLogger(__name__)
NOTE = b"note"
Rows = Sequence[tuple[bytes, dict[bytes, bytes] | None]]


class AckPolicy(Enum):
    """When a work queue's entry is acknowledged and deleted."""

    ON_RECEIPT = "before it is handled: at most once"
    ON_SUCCESS = "after its handler returned: at least once"
    BY_HANDLER = "by the handler, in a transaction of its own"


class Entry(Struct, frozen=True):
    """One stream entry; `key` is its stream, `entry_id` its Redis id, `note` what was written on it on its way."""

    key: str
    entry_id: str
    kind: str
    id: str
    data: bytes
    note: bytes = b""


def fields(kind: str, id_: str, data: bytes) -> dict[Any, Any]:
    """The fields of an entry, as XADD takes them."""
    return {"kind": kind, "id": id_, "data": data}


def parse(key: str, rows: Rows) -> list[Entry]:
    """Entries of one reply. What has no body (a ghost of a trimmed stream) or not the fields of one is left out."""
    return [
        Entry(
            key,
            id_.decode(),
            row[b"kind"].decode(errors="replace"),
            row[b"id"].decode(errors="replace"),
            row[b"data"],
            row.get(NOTE, b""),
        )
        for id_, row in rows
        if row and b"kind" in row and b"id" in row and b"data" in row
    ]


class WorkQueue:
    """One consumer of one stream through a group made at the start of the stream, and remade when it is gone."""

    def __init__(self, redis: Redis, key: str, group: str, consumer: str, policy: AckPolicy) -> None:
        self.redis, self.key, self.group, self.consumer, self.policy = redis, key, group, consumer, policy

    async def create(self) -> None:
        """Make stream and group; both may exist."""
        try:
            await self.redis.xgroup_create(self.key, self.group, id="0", mkstream=True)
        except failures.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def read(self, count: int, block_s: float = BLOCK_S) -> list[Entry]:
        """Up to `count` new entries, waiting at most about `block_s` (0: not at all)."""
        return await self._read(">", count, block_s)

    async def unfinished(self, count: int) -> list[Entry]:
        """Entries this consumer was given earlier and has not acknowledged, oldest first."""
        return await self._read("0", count, 0)

    async def claim(self, consumer: str, count: int) -> list[Entry]:
        """Take over entries that a dead consumer holds. That it is dead the caller knows, never by idle time."""
        pending = await self.redis.xpending_range(self.key, self.group, "-", "+", count, consumername=consumer)
        if not pending:
            return []
        ids = [row["message_id"] for row in pending]
        return await self._entries(await self.redis.xclaim(self.key, self.group, self.consumer, 0, ids))

    async def ack(self, *entry_ids: str) -> None:
        """Acknowledge and delete in one transaction."""
        async with self.redis.pipeline(transaction=True) as pipe:
            pipe.xack(self.key, self.group, *entry_ids)
            pipe.xdel(self.key, *entry_ids)
            await pipe.execute()

    async def handle(self, handler: Callable[[Entry], Awaitable[None]], count: int, block_s: float = BLOCK_S) -> int:
        """Read once and pass each entry to `handler` under the queue's ack policy; returns how many there were."""
        entries = await self.read(count, block_s)
        for entry in entries:
            if self.policy is AckPolicy.ON_RECEIPT:
                await self.ack(entry.entry_id)
            await handler(entry)
            if self.policy is AckPolicy.ON_SUCCESS:
                await self.ack(entry.entry_id)
        return len(entries)

    async def _read(self, start: str, count: int, block_s: float) -> list[Entry]:
        block_ms = max(1, round(block_s * 1000)) if block_s > 0 else None
        try:
            reply = await self.redis.xreadgroup(self.group, self.consumer, {self.key: start}, count, block_ms)
        except failures.ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await self.create()
            return []
        return await self._entries(reply[0][1]) if reply else []

    async def _entries(self, rows: Rows) -> list[Entry]:
        """The entries among `rows`; the rest is removed, or it would count as waiting for ever."""
        entries = parse(self.key, rows)
        known = {entry.entry_id for entry in entries}
        wrong = [id_.decode() for id_, _ in rows if id_.decode() not in known]
        if wrong:
            log.error("removing what is no entry of %s: %s", self.key, ", ".join(wrong))
            await self.ack(*wrong)
        return entries


class Tail:
    """Follows streams that many read: no group, a remembered position each, from now on unless told otherwise."""

    def __init__(self, redis: Redis, *keys: str) -> None:
        self.redis = redis
        self.positions: dict[str, str] = dict.fromkeys(keys, "")

    async def start(self, position: str = "") -> None:
        """Fix positions that are not known yet: at `position`, or at each stream's current end."""
        for key, known in self.positions.items():
            if not known:
                last = await self.redis.xrevrange(key, count=1) if not position else []
                self.positions[key] = position or (last[0][0].decode() if last else "0")

    async def read(self, count: int, block_s: float = BLOCK_S) -> list[Entry]:
        """Up to `count` entries of each stream after the last ones read, waiting at most about `block_s`."""
        await self.start()
        block_ms = max(1, round(block_s * 1000)) if block_s > 0 else None
        reply = await self.redis.xread(dict(self.positions), count, block_ms)
        entries: list[Entry] = []
        for key, rows in reply or []:
            name = key.decode()
            self.positions[name] = rows[-1][0].decode()
            entries += parse(name, rows)
        return entries

    async def drop_read(self) -> None:
        """Remove what was read, but for a node or two, from streams that nobody else reads."""
        for key, position in self.positions.items():
            if position:
                await self.redis.xtrim(key, minid=position, approximate=True)


async def append(
    redis: Redis, key: str, kind: str, id_: str, data: bytes, *, maxlen: int | None = None, ttl_s: float | None = None
) -> str:
    """XADD; `maxlen` trims (never a work stream), `ttl_s` lets the whole stream expire unless written again."""
    async with redis.pipeline(transaction=ttl_s is not None) as pipe:
        pipe.xadd(key, fields(kind, id_, data), maxlen=maxlen, approximate=True)
        if ttl_s is not None:
            pipe.pexpire(key, round(ttl_s * 1000))
        results = await pipe.execute()
    return bytes(results[0]).decode()


def order(entry_id: str) -> tuple[int, ...]:
    """A stream entry's id as numbers: ids compare as these do. "" is before all."""
    return tuple(int(part) for part in entry_id.split("-")) if entry_id else ()
