"""The requests this ingress waits for: sent, followed through the replies, sent again where a replica was lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from collm_common import messages
from collm_common.broker import AWAY, patiently, stop_all
from collm_common.clock import Clock, ticks
from collm_common.errors import BrokerError, MessageError, Overloaded, RequestError, Unavailable
from collm_common.messages import Delta, Done, Failed, Replies, Reply, Request
from collm_common.streams import Tail
from redis.asyncio import Redis

from collm_dispatcher.cell import Cell
from collm_dispatcher.ingress.admission import Admission
from collm_dispatcher.ingress.answer import Again, Answer
from collm_dispatcher.retry import forever
from collm_dispatcher.settings import DispatcherSettings

log = logging.getLogger(__name__)
READ_COUNT = 1024
BROKER_PATIENCE_S = 30.0
WATCH_S = 1.0


class Refused(RequestError):
    """What a replica or the dispatch loop answered instead of tokens."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message, code=failed.code, retry_after_s=1.0 if failed.status in (429, 503) else None)
        self.status = failed.status
        self.type = "invalid_request_error" if failed.status < 500 else "server_error"


class Open:
    """One request from its sending to its end; at most its own tokens are held for a slow client."""

    def __init__(self, request: Request) -> None:
        self.answer = Answer(request)
        self.entry: asyncio.Task[str] | None = None
        self.ended = False
        self.started = False
        self._steps: asyncio.Queue[Delta | Done | RequestError] = asyncio.Queue(request.sampling.max_tokens + 2)

    @property
    def attempts(self) -> int:
        """How often it was sent."""
        return self.answer.request.attempt + 1

    async def next(self) -> Delta | Done:
        """What comes next; Done is the last. Raises RequestError when there will be no answer."""
        step = await self._steps.get()
        if isinstance(step, RequestError):
            raise step
        return step

    def put(self, step: Delta | Done | RequestError) -> None:
        """Hand over one step; after the last one nothing follows."""
        if self.ended:
            return
        self.started = True
        self.ended = not isinstance(step, Delta)
        self._steps.put_nowait(step)


class OpenRequests:
    """Follows `replies:{ingress}`. Only this process knows what its clients have seen, so it alone sends again."""

    def __init__(self, settings: DispatcherSettings, redis: Redis, cell: Cell, ingress: str, clock: Clock) -> None:
        self.settings, self.redis, self.cell, self.ingress, self.clock = settings, redis, cell, ingress, clock
        self._key = settings.keys.replies(ingress)
        self._admission = Admission(
            redis, settings.keys, settings.max_queued, settings.max_streams, settings.retry_after_s
        )
        self._open: dict[str, Open] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._broker = ""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def running(self) -> int:
        """Requests of which something has come back."""
        return sum(open_.started for open_ in self._open.values())

    @asynccontextmanager
    async def opened(self, request: Request) -> AsyncIterator[Open]:
        """Sent inside the block; whoever leaves it before the end cancels. Raises RequestError."""
        if len(self._open) >= self.settings.max_open:
            raise Overloaded(
                f"{len(self._open)} requests are open here, which is the limit",
                retry_after_s=self.settings.retry_after_s,
            )
        open_ = Open(request)
        self._open[request.id] = open_
        open_.entry = asyncio.create_task(self._admission.admit(request))
        try:
            await self._sent(open_.entry)
            yield open_
        finally:
            self._close(request.id)

    async def run(self) -> None:
        """Follow the replies for ever."""
        tail = Tail(self.redis, self._key)
        await tail.start("0")

        async def step() -> None:
            for entry in await tail.read(READ_COUNT):
                try:
                    message = messages.decode(entry.data)
                except MessageError as error:
                    log.error("dropping reply %s: %s", entry.entry_id, error)
                    continue
                if isinstance(message, Replies):
                    for reply in message.items:
                        self._take(reply)

        watch = asyncio.create_task(self._watch_broker())
        try:
            await forever("replies", step, self.clock)
        finally:
            await stop_all(watch)

    async def drain(self, within_s: float) -> None:
        """Wait for the open ones; those that are not through by then are told that the service ends."""
        self._empty.clear()
        try:
            async with asyncio.timeout(within_s):
                while self._open:
                    self._empty.clear()
                    await self._empty.wait()
        except TimeoutError:
            for open_ in self._open.values():
                open_.put(Unavailable("the service is shutting down", code="rejected-shutting-down"))
        await asyncio.gather(*self._background)

    async def forget(self) -> None:
        """Nobody reads the replies any more."""
        await self.redis.delete(self._key)

    # --- replies

    def _take(self, reply: Reply) -> None:
        open_ = self._open.get(reply.id)
        if open_ is None or open_.ended:
            return
        match open_.answer.take(reply):
            case Again(reason):
                self._again(open_, reason)
            case Failed() as failed:
                open_.put(Refused(failed))
            case Delta() | Done() as step:
                open_.put(step)
            case _:
                pass

    def _again(self, open_: Open, reason: str) -> None:
        if open_.attempts >= self.settings.max_attempts:
            message = f"given up after {open_.attempts} attempts: {reason}"
            open_.put(Unavailable(message, code="replica_lost", retry_after_s=self.settings.retry_after_s))
            return
        request, before = open_.answer.again(), open_.entry
        assert before is not None
        log.info("request %s, attempt %d: %s", request.id, request.attempt, reason)

        async def resend() -> str:
            old = await before
            return await patiently(lambda: self._admission.readmit(request, old), BROKER_PATIENCE_S, self.clock)

        open_.entry = asyncio.create_task(resend())
        self._spawn(self._report(open_, open_.entry))

    async def _report(self, open_: Open, entry: asyncio.Task[str]) -> None:
        try:
            await self._sent(entry)
        except RequestError as error:
            open_.put(error)

    async def _sent(self, entry: asyncio.Task[str]) -> None:
        try:
            await asyncio.shield(entry)
        except (*AWAY, BrokerError) as error:
            raise Unavailable("the broker is away", retry_after_s=self.settings.retry_after_s) from error

    async def _watch_broker(self) -> None:
        """A broker that restarted may have lost its last second: everything open is sent again."""

        async def look() -> None:
            async for _ in ticks(WATCH_S, self.clock):
                run_id = str((await self.redis.info("server"))["run_id"])
                if self._broker and run_id != self._broker:
                    for open_ in list(self._open.values()):
                        if not open_.ended and open_.entry is not None and open_.entry.done():
                            self._again(open_, "the broker restarted")
                self._broker = run_id

        await forever("broker", look, self.clock)

    # --- the end of a request

    def _close(self, request_id: str) -> None:
        open_ = self._open.pop(request_id)
        if not self._open:
            self._empty.set()
        if not open_.ended:
            open_.ended = True
            self._spawn(self._abandon(open_))

    async def _abandon(self, open_: Open) -> None:
        request, entry = open_.answer.request, open_.entry
        assert entry is not None
        try:
            entry_id = await entry
            replicas = [member.info.id for member in self.cell.of(request.model)]
            await patiently(lambda: self._admission.cancel(request, entry_id, replicas), BROKER_PATIENCE_S, self.clock)
        except RequestError:
            return
        except (*AWAY, BrokerError) as error:
            log.warning("request %s is not cancelled: %s", request.id, error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
