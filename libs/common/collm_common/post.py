"""Messages on the streams that many read and nobody empties: commands, telemetry and events, each kept to a length."""

from __future__ import annotations

from typing import Any

from redis.asyncio import Redis

from collm_common import messages
from collm_common.keys import Keys
from collm_common.messages import AnyMessage, Control, Event, Freed, Telemetry
from collm_common.streams import append, fields

CONTROL_MAXLEN = 10_000
ROOM_MAXLEN = 1_000
TELEMETRY_MAXLEN = 5_000
EVENTS_MAXLEN = 100_000


async def command(redis: Redis, keys: Keys, replica: str, message: Control, about: str) -> None:
    """Tell one replica; `about` is for people."""
    await _append(redis, keys.control(replica), message, about, CONTROL_MAXLEN)


async def report(redis: Redis, keys: Keys, message: Telemetry) -> None:
    """What a replica measured."""
    await _append(redis, keys.telemetry, message, message.replica, TELEMETRY_MAXLEN)


async def event(redis: Redis, keys: Keys, message: Event, about: str) -> None:
    """What happened, for all."""
    await _append(redis, keys.events, message, about, EVENTS_MAXLEN)


def queue_freed(pipe: Any, keys: Keys, replica: str, requests: int) -> None:
    """Room has come back at a replica, as a part of the caller's transaction."""
    _queue(pipe, keys.room, Freed(replica=replica, requests=requests), replica, ROOM_MAXLEN)


def queue_command(pipe: Any, keys: Keys, replica: str, message: Control, about: str) -> None:
    """`command` as a part of the caller's transaction."""
    _queue(pipe, keys.control(replica), message, about, CONTROL_MAXLEN)


def queue_event(pipe: Any, keys: Keys, message: Event, about: str) -> None:
    """`event` as a part of the caller's transaction."""
    _queue(pipe, keys.events, message, about, EVENTS_MAXLEN)


async def _append(redis: Redis, key: str, message: AnyMessage, about: str, maxlen: int) -> None:
    await append(redis, key, messages.kind(message), about, messages.encode(message), maxlen=maxlen)


def _queue(pipe: Any, key: str, message: AnyMessage, about: str, maxlen: int) -> None:
    entry = fields(messages.kind(message), about, messages.encode(message))
    pipe.xadd(key, entry, maxlen=maxlen, approximate=True)
