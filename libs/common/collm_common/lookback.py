"""What a cell did lately: from the streams that are kept to a length, and the lengths of its queues."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct
from redis.asyncio import Redis

from collm_common import messages
from collm_common.errors import MessageError
from collm_common.keys import Keys
from collm_common.messages import AnyMessage, InferenceReport
from collm_common.streams import parse
from collm_common.trouble import contained, readable, written

log = logging.getLogger(__name__)
WINDOW_S = 10.0
AT_ONCE = 200


class Queue(Struct, frozen=True):
    """An original request stream and how many wait in it."""

    model: str
    slo: str
    length: int


class Recent:
    """The last `keep` messages of one stream, oldest first; `catch_up` reads what is new since the last one."""

    def __init__(self, redis: Redis, key: str, keep: int) -> None:
        self._redis, self._key, self._keep = redis, key, keep
        self._after = ""
        self.messages: deque[AnyMessage] = deque(maxlen=keep)

    async def catch_up(self) -> None:
        """Reads at most `keep` entries, however long ago the last call was; others run in between.

        A key that is no stream has nothing new, until it is repaired.
        """
        with contained(self._key):
            await self._catch_up()

    async def _catch_up(self) -> None:
        oldest = f"({self._after}" if self._after else "-"
        rows = await self._redis.xrevrange(self._key, min=oldest, count=self._keep)
        rows.reverse()
        for start in range(0, len(rows), AT_ONCE):
            self._take(rows[start : start + AT_ONCE])
            await asyncio.sleep(0)

    def _take(self, rows: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> None:
        self._after = rows[-1][0].decode()
        for entry in parse(self._key, rows):
            try:
                self.messages.append(messages.decode(entry.data))
            except MessageError as error:
                log.error("skipping %s of %s: %s", entry.entry_id, self._key, error)


async def queues(redis: Redis, keys: Keys) -> list[Queue]:
    """Every original stream of the cell, by name; none where their set is damaged."""
    names: list[str] = []
    with contained(keys.streams):
        names = sorted(written(keys.streams, await redis.smembers(keys.streams)))
    pairs = [name.rpartition("|")[::2] for name in names]
    lengths = await _lengths(redis, [keys.requests(model, slo) for model, slo in pairs])
    return [Queue(model, slo, length) for (model, slo), length in zip(pairs, lengths, strict=True)]


async def subflows(redis: Redis, keys: Keys, replicas: Iterable[str]) -> dict[str, int]:
    """How many requests each replica has been sent and has not answered yet."""
    ids = list(replicas)
    return dict(zip(ids, await _lengths(redis, [keys.subflow(id_) for id_ in ids]), strict=True))


def latest(reports: Iterable[InferenceReport]) -> dict[str, InferenceReport]:
    """The last one of each replica; `reports` are oldest first."""
    return {report.replica: report for report in reports}


def throughput(reports: Iterable[InferenceReport], now_s: float, window_s: float = WINDOW_S) -> float:
    """Output tokens per second of all replicas over the last `window_s`."""
    return sum(report.output_tokens for report in reports if now_s - report.time_s <= window_s) / window_s


async def _lengths(redis: Redis, keys: Sequence[str]) -> list[int]:
    async with redis.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.xlen(key)
        replies = await pipe.execute(raise_on_error=False)
    return [readable(int, key, reply) or 0 for key, reply in zip(keys, replies, strict=True)]
