"""What an engine says, carried to the ingresses: one transaction a step with the acknowledgements it implies."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from msgspec import Struct
from redis.asyncio import Redis

from collm_common import messages, post, streams
from collm_common.broker import patiently
from collm_common.errors import BrokerFault
from collm_common.keys import Keys
from collm_common.messages import Done, Expected, Failed, Replies, Reply
from collm_common.requeue import GROUP, REPLIES_MAXLEN, REPLIES_TTL_S
from collm_common.types import AdapterRef
from collm_replica.traces import Trace

log = logging.getLogger(__name__)
MAX_BACKLOG = 256
PATIENCE_S = 600.0


class Open(Struct, frozen=True):
    """A request that is here: the entry to acknowledge, the ingress that waits, and what is expected of it.

    `adapter` is what answered it, once its text has ended; `trace` are its spans.
    """

    entry_id: str
    ingress: str
    attempt: int
    slo: str = ""
    tpot_s: float | None = None
    expected: Expected | None = None
    adapter: AdapterRef | None = None
    trace: Trace | None = None


class Outbox:
    """Bounded: an engine that outruns the broker waits in `put`.

    `unacknowledged` are the entries that were received; one leaves it when its acknowledgement is in Redis.
    """

    def __init__(self, redis: Redis, keys: Keys, replica: str) -> None:
        self._redis, self._keys, self._replica, self._subflow = redis, keys, replica, keys.subflow(replica)
        self.unacknowledged: set[str] = set()
        self._queue: asyncio.Queue[tuple[list[tuple[str, Reply]], list[str]]] = asyncio.Queue(MAX_BACKLOG)

    async def put(self, replies: Sequence[tuple[Open, Reply]], forget: Sequence[str] = ()) -> None:
        """Replies in order; final ones take their entry along. `forget`: entries that get no reply."""
        if not replies and not forget:
            return
        done = [open_.entry_id for open_, reply in replies if isinstance(reply, Done | Failed)]
        await self._queue.put(([(open_.ingress, reply) for open_, reply in replies], [*done, *forget]))

    @property
    def full(self) -> bool:
        """Whether the engine waits for the broker."""
        return self._queue.full()

    async def flushed(self) -> None:
        """Wait until everything put so far is in Redis."""
        await self._queue.join()

    async def run(self) -> None:
        """Send for ever. Raises BrokerError when the broker stays away: then the requests are re-dispatched anyway."""
        while True:
            replies, entry_ids = await self._queue.get()
            try:
                await patiently(partial(self._send, replies, entry_ids), PATIENCE_S)
            except BrokerFault:
                await self._send_apart(replies, entry_ids)
            self.unacknowledged.difference_update(entry_ids)
            self._queue.task_done()

    async def _send_apart(self, replies: Sequence[tuple[str, Reply]], entry_ids: Sequence[str]) -> None:
        """A damaged key of one ingress, or of this replica, keeps nothing from the others; its own part is dropped."""
        for ingress in dict.fromkeys(ingress for ingress, _ in replies):
            own = [(to, reply) for to, reply in replies if to == ingress]
            await self._try(partial(self._send, own, ()))
        await self._try(partial(self._send, (), entry_ids))

    async def _try(self, send: Callable[[], Awaitable[None]]) -> None:
        try:
            await patiently(send, PATIENCE_S)
        except BrokerFault as error:
            log.error("replies are dropped: %s", error)

    async def _send(self, replies: Sequence[tuple[str, Reply]], entry_ids: Sequence[str]) -> None:
        by_ingress: dict[str, list[Reply]] = defaultdict(list)
        for ingress, reply in replies:
            by_ingress[ingress].append(reply)
        async with self._redis.pipeline(transaction=True) as pipe:
            for ingress, items in by_ingress.items():
                key, data = self._keys.replies(ingress), messages.encode(Replies(items=tuple(items)))
                pipe.xadd(key, streams.fields("replies", items[0].id, data), maxlen=REPLIES_MAXLEN, approximate=True)
                pipe.pexpire(key, round(REPLIES_TTL_S * 1000))
            if entry_ids:
                pipe.xack(self._subflow, GROUP, *entry_ids)
                pipe.xdel(self._subflow, *entry_ids)
                post.queue_freed(pipe, self._keys, self._replica, len(entry_ids))
            await pipe.execute()
