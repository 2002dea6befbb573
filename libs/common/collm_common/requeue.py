"""Giving up a replica's requests: each entry ends in exactly one Lost reply to the ingress that waits for it."""

from __future__ import annotations

import logging

from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.errors import MessageError
from collm_common.keys import Keys
from collm_common.messages import Lost, Replies, Request
from collm_common.scripts import GIVE_UP

log = logging.getLogger(__name__)

GROUP = "collm"
REPLIES_MAXLEN = 50_000
REPLIES_TTL_S = 600.0


async def give_up_subflow(redis: Redis, keys: Keys, replica: str, batch: int = 256) -> int:
    """Empty the subflow of a replica whose inference process is gone; returns how many requests were lost.

    Safe to run by several at once and beside a process that still lives: an entry is given up or answered, never both.
    """
    key, count = keys.subflow(replica), 0
    script = redis.register_script(GIVE_UP)
    while rows := await redis.xrange(key, count=batch):
        for entry in streams.parse(key, rows):
            try:
                request = messages.decode(entry.data)
            except MessageError as error:
                log.error("dropping entry %s of %s: %s", entry.entry_id, key, error)
                continue
            assert isinstance(request, Request)
            lost = Replies(items=(Lost(id=request.id, attempt=request.attempt),))
            args = [
                GROUP,
                entry.entry_id,
                request.id,
                messages.encode(lost),
                REPLIES_MAXLEN,
                round(REPLIES_TTL_S * 1000),
            ]
            count += int(await script(keys=[key, keys.replies(request.ingress)], args=args))
        await redis.xdel(key, *[row[0] for row in rows])
    return count
