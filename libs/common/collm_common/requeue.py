"""Giving up a replica's requests: each entry ends in exactly one Lost reply to the ingress that waits for it."""

from __future__ import annotations

import logging

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from collm_common import messages, streams
from collm_common.errors import MessageError
from collm_common.keys import Keys
from collm_common.messages import Failed, Lost, Replies, Request
from collm_common.scripts import GIVE_UP
from collm_common.trouble import TROUBLES, fault

log = logging.getLogger(__name__)

GROUP = "collm"
REPLIES_MAXLEN = 50_000
REPLIES_TTL_S = 600.0


class GiveUp:
    """Ends one entry of a stream with one reply to the ingress that waits for it."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._keys, self._script = keys, redis.register_script(GIVE_UP)

    async def __call__(self, stream: str, entry_id: str, ingress: str, reply: Failed | Lost) -> bool:
        """False, and nothing is said, if the entry is not there any more."""
        data = messages.encode(Replies(items=(reply,)))
        args = [GROUP, entry_id, reply.id, data, REPLIES_MAXLEN, round(REPLIES_TTL_S * 1000)]
        return bool(await self._script(keys=[stream, self._keys.replies(ingress)], args=args))


async def give_up_subflow(redis: Redis, keys: Keys, replica: str, batch: int = 256, unread: bool = False) -> int:
    """Empty the subflow of a replica whose inference process is gone; returns how many requests were lost.

    With `unread`, what the process has read is left to it: it answers that, and takes nothing new. Safe to run by
    several at once and beside a process that still lives: an entry is given up or answered, never both.
    """
    key, count = keys.subflow(replica), 0
    give_up = GiveUp(redis, keys)
    while rows := await _first(redis, key, batch, unread):
        for entry in streams.parse(key, rows):
            try:
                request = messages.decode_as(Request, entry.data)
            except MessageError as error:
                log.error("dropping entry %s of %s: %s", entry.entry_id, key, error)
                continue
            count += await give_up(key, entry.entry_id, request.ingress, Lost(request.id, request.attempt))
        await redis.xdel(key, *[row[0] for row in rows])
    return count


async def _first(redis: Redis, key: str, count: int, unread: bool) -> streams.Rows:
    """A key of a wrong type has no requests and would keep new ones away: it is removed."""
    try:
        after = await _last_read(redis, key) if unread else "-"
        rows: streams.Rows = await redis.xrange(key, min=after, count=count)
    except ResponseError as error:
        if fault(error) != "WRONGTYPE":
            raise
        TROUBLES.skip(key, error)
        await redis.delete(key)
        return []
    return rows


async def _last_read(redis: Redis, key: str) -> str:
    """Behind what the group was given; the beginning where there is no group."""
    groups = await redis.xinfo_groups(key) if await redis.exists(key) else []
    ids = [row["last-delivered-id"].decode() for row in groups if row["name"] == GROUP.encode()]
    return f"({ids[0]}" if ids else "-"
