"""What the leader of a model has read of its original streams and not yet released."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container
from math import inf
from typing import Protocol

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from collm_common import messages
from collm_common.broker import stop_all
from collm_common.clock import Clock
from collm_common.errors import MessageError
from collm_common.keys import Keys
from collm_common.messages import Request
from collm_common.requeue import GROUP
from collm_common.retry import forever, once
from collm_common.streams import AckPolicy, Entry, WorkQueue
from collm_common.trouble import contained
from collm_dispatcher.policy.queue import DeadlineQueue, Place, Waiting
from collm_dispatcher.policy.streams import Streams

log = logging.getLogger(__name__)
READ_COUNT = 256


class Listener(Protocol):
    """Who is told what comes in."""

    def latest_s(self, request: Request) -> float | None:
        """When a request must begin to be in time (Unix seconds); None: not known."""

    def arrived(self, news: bool) -> None:
        """After each batch of new entries; `news`: one of them changes what is known of its stream."""


class Backlog:
    """One reader task a stream; at most about `max_held` entries are held, the rest waits in Redis."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        consumer: str,
        max_held: int,
        clock: Clock,
        learned: Streams,
        listener: Listener,
    ) -> None:
        self._redis, self._keys, self._consumer, self._clock = redis, keys, consumer, clock
        self._max_held, self._learned, self._listener = max_held, learned, listener
        self._streams: dict[str, WorkQueue] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}
        self._used_s: dict[str, float] = {}
        self._space, self._closed = asyncio.Event(), False
        self._settled: set[Place] = set()
        self.queue = DeadlineQueue()

    def follow(self, key: str) -> None:
        """Start to read a stream; once is enough."""
        if key in self._streams or self._closed:
            return
        stream = WorkQueue(self._redis, key, GROUP, self._consumer, AckPolicy.BY_HANDLER)
        self._streams[key], self._used_s[key] = stream, self._clock.monotonic()
        self._readers[key] = asyncio.create_task(self._follow(stream))

    async def prune(self, unused_s: float, kept: Container[str], remove: Callable[[str], Awaitable[bool]]) -> None:
        """Stop to read what had no entry for so long, and `remove` it; read it on if that says it is used again."""
        before_s = self._clock.monotonic() - unused_s
        for key in [key for key, used_s in self._used_s.items() if used_s < before_s and key not in kept]:
            if any(item.key == key for item in self.queue) or key not in self._streams:
                continue
            del self._streams[key], self._used_s[key]
            await stop_all(self._readers.pop(key))
            if await remove(key):
                self._learned.forget(key)
            else:
                self.follow(key)

    async def close(self) -> None:
        """Stop reading. What is held stays pending for the next leader."""
        self._closed = True
        await stop_all(*self._readers.values())

    def check(self) -> None:
        """Raise the error of a reader that failed."""
        for task in self._readers.values():
            if task.done():
                task.result()

    def settle(self, item: Waiting) -> None:
        """It was released or is gone."""
        self.queue.remove(item)
        self._settled.add(item.place)
        self._space.set()

    async def reclaim(self) -> None:
        """Take over what other consumers hold (they do not lead), and what was sent here but never arrived."""
        for key, stream in list(self._streams.items()):
            with contained(key):
                await self._reclaim(stream)

    async def _reclaim(self, stream: WorkQueue) -> None:
        self._settled.clear()
        held = sum(1 for item in self.queue if item.key == stream.key)
        try:
            summary = await self._redis.xpending(stream.key, GROUP)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await stream.create()
            return
        for consumer in summary["consumers"]:
            name = consumer["name"].decode(errors="replace")
            if name != self._consumer:
                await self._take(stream, await stream.claim(name, READ_COUNT))
            elif consumer["pending"] > held:
                entries = await stream.unfinished(self._max_held)
                # Settled while this was on its way: it would come back as one that nobody can move.
                await self._take(stream, [entry for entry in entries if _place(entry) not in self._settled])

    async def _follow(self, stream: WorkQueue) -> None:
        await once(stream.key, stream.create, self._clock)
        await forever(stream.key, lambda: self._read(stream), self._clock)

    async def _read(self, stream: WorkQueue) -> None:
        while len(self.queue) >= self._max_held:
            self._space.clear()
            await self._space.wait()
        await self._take(stream, await stream.read(READ_COUNT))

    async def _take(self, stream: WorkQueue, entries: list[Entry]) -> None:
        news = False
        for entry in entries:
            try:
                request = messages.decode_as(Request, entry.data)
            except MessageError as error:
                log.error("dropping entry %s of %s: %s", entry.entry_id, entry.key, error)
                await stream.ack(entry.entry_id)
                continue
            if _place(entry) in self.queue:
                continue
            length = len(request.prompt) + len(request.prefix)
            news |= self._learned.arrived(entry.key, request.slo, length, self._clock.monotonic())
            self.queue.add(_waiting(entry, request, length, self._listener.latest_s(request)))
        if entries:
            self._used_s[stream.key] = self._clock.monotonic()
            self._listener.arrived(news)


def _place(entry: Entry) -> Place:
    return (entry.key, entry.entry_id)


def _waiting(entry: Entry, request: Request, prompt_tokens: int, latest_s: float | None) -> Waiting:
    # Whose answer has begun waits for its last token alone.
    first_s = inf if request.prefix else request.slo.first_due(request.arrival_s)
    return Waiting(
        key=entry.key,
        entry_id=entry.entry_id,
        request_id=request.id,
        ingress=request.ingress,
        attempt=request.attempt,
        arrival_s=request.arrival_s,
        deadline_s=min(request.deadline_s, first_s),
        slo=request.slo,
        latest_s=latest_s,
        tenant=request.tenant,
        prompt_tokens=prompt_tokens,
    )
