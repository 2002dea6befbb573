"""Which versions of an adapter were current, and the way back to one of them."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct
from redis.asyncio import Redis
from redis.exceptions import WatchError

from collm_common import blobs, post
from collm_common.errors import AdapterError
from collm_common.keys import Keys
from collm_common.messages import AdapterRolledBack, LoadAdapter
from collm_common.registry import Registry
from collm_common.streams import Rows
from collm_common.trouble import TROUBLES

HISTORY_MAXLEN = 1000
TRIES = 5


class Turn(Struct, frozen=True):
    """One change of the current version, as its stream entry has it; `parent` was current before.

    `job` and `round` made the version, `before` and `after` are the held-out cross-entropies that it was judged by;
    `reason` tells why, where a person did it.
    """

    version: int
    parent: int
    time_s: float
    job: str = ""
    round: int = 0
    before: float | None = None
    after: float | None = None
    reason: str = ""


def numbers(row: bytes | None) -> list[int]:
    """Versions written as `1,2,3`; what is no number is left out."""
    return [int(part) for part in (row or b"").decode(errors="replace").split(",") if part.isdigit()]


def queue_turn(pipe: Any, keys: Keys, name: str, turn: Turn) -> None:
    """Append to the adapter's history as a part of the caller's transaction."""
    told = {field: str(value) for field, value in msgspec.structs.asdict(turn).items() if value not in (None, "")}
    pipe.xadd(keys.adapter_history(name), told, maxlen=HISTORY_MAXLEN, approximate=True)


async def history(redis: Redis, keys: Keys, name: str) -> list[Turn]:
    """All turns, oldest first. Raises AdapterError for an unknown adapter."""
    if not await redis.exists(keys.adapter(name)):
        raise AdapterError(f"no adapter {name!r}")
    return turns(await redis.xrange(keys.adapter_history(name)))


def turns(rows: Rows) -> list[Turn]:
    """Entries of an adapter's history; damaged ones are left out."""
    found = []
    for entry_id, row in rows:
        try:
            fields = {field.decode(): value.decode() for field, value in (row or {}).items()}
            found.append(msgspec.convert(fields, Turn, strict=False))
        except (msgspec.ValidationError, UnicodeDecodeError) as error:
            TROUBLES.skip(f"{entry_id.decode()} of an adapter's history", error)
    return found


async def roll_back(redis: Redis, keys: Keys, name: str, to: int | None, reason: str, now: float) -> Turn:
    """Make an older version current on every replica of the model; None is the one before the current one.

    Version 0 is the base model. A job that trains the adapter ends. Raises AdapterError.
    """
    for _ in range(TRIES):
        try:
            return await _try(redis, keys, name, to, reason, now)
        except WatchError:
            continue
    raise AdapterError(f"adapter {name!r} kept changing: nothing was rolled back")


async def _try(redis: Redis, keys: Keys, name: str, to: int | None, reason: str, now: float) -> Turn:
    key = keys.adapter(name)
    async with redis.pipeline(transaction=True) as pipe:
        await pipe.watch(key)
        version, published, model = await pipe.hmget(key, ["version", "published", "model"])
        if version is None or not version.isdigit():
            raise AdapterError(f"no adapter {name!r}" if version is None else f"adapter {name!r} is damaged")
        current, stored = int(version), numbers(published)
        target = max((old for old in stored if old < current), default=0) if to is None else to
        if target == current:
            raise AdapterError(f"version {current} of {name!r} is current already")
        if target and (target not in stored or await blobs.meta(redis, keys.adapter_version(name, target)) is None):
            kept = ", ".join(map(str, [0, *sorted(set(stored) - {current})]))
            raise AdapterError(f"version {target} of {name!r} is not stored: choose among {kept}")
        replicas = [info.id for info in (await Registry(redis, keys).replicas()).values() if info.model == _text(model)]
        pipe.multi()
        kept = ",".join(map(str, [*(old for old in stored if old != target), *([target] if target else [])]))
        pipe.hset(key, mapping={"version": target, "published": kept})
        for id_ in replicas:
            post.queue_command(pipe, keys, id_, LoadAdapter(name=name, version=target), name)
        turn = Turn(target, current, now, reason=reason)
        queue_turn(pipe, keys, name, turn)
        event = AdapterRolledBack(name=name, version=target, before=current, reason=reason, time_s=now)
        post.queue_event(pipe, keys, event, name)
        await pipe.execute()
        return turn


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")
