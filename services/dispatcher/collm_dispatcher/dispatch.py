"""The dispatch role: a leader (or a candidate) for every model whose streams exist."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from collm_common import messages
from collm_common.broker import stop_all
from collm_common.clock import Clock, ticks
from collm_common.errors import MessageError
from collm_common.messages import Freed, InferenceReport
from collm_common.retry import forever
from collm_common.streams import Entry, Tail
from collm_dispatcher.cell import Cell
from collm_dispatcher.leader import Leader
from collm_dispatcher.settings import DispatcherSettings

log = logging.getLogger(__name__)
READ_COUNT = 512


class Dispatch:
    """Streams are found through the set `streams` (`model|slo`)."""

    def __init__(self, settings: DispatcherSettings, redis: Redis, cell: Cell, holder: str, clock: Clock) -> None:
        self.settings, self.redis, self.cell, self.holder, self.clock = settings, redis, cell, holder, clock
        self.leaders: dict[str, Leader] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """For ever. Raises what a leader raised."""
        try:
            await forever("streams", self._discover, self.clock)
        finally:
            await stop_all(*self._tasks.values())

    async def listen(self) -> None:
        """For ever: tell the leaders what replicas say. What is missed, the next macro-cycle sees by itself."""
        tail = Tail(self.redis, self.settings.keys.room, self.settings.keys.telemetry)

        async def step() -> None:
            for entry in await tail.read(READ_COUNT):
                self._hear(entry)

        await forever("room", step, self.clock)

    def _hear(self, entry: Entry) -> None:
        try:
            message = messages.decode(entry.data)
        except MessageError as error:
            log.error("skipping entry %s of %s: %s", entry.entry_id, entry.key, error)
            return
        terms = [leader.term for leader in self.leaders.values() if leader.term is not None]
        for term in terms:
            if isinstance(message, Freed):
                term.freed(message)
            elif isinstance(message, InferenceReport):
                term.reported(message)

    async def _discover(self) -> None:
        async for _ in ticks(self.settings.refresh_s, self.clock):
            slos: dict[str, set[str]] = {model: set() for model in self.leaders}
            for name in await self.redis.smembers(self.settings.keys.streams):
                model, divided, slo = name.decode(errors="replace").rpartition("|")
                if divided:
                    slos.setdefault(model, set()).add(slo)
            for model, found in slos.items():
                leader = self._leader(model)
                leader.follow(found)
                await leader.prune()
            for task in self._tasks.values():
                if task.done():
                    task.result()

    def _leader(self, model: str) -> Leader:
        if model not in self.leaders:
            leader = Leader(model, self.settings, self.redis, self.cell, self.holder, self.clock)
            self.leaders[model] = leader
            self._tasks[model] = asyncio.create_task(leader.run())
        return self.leaders[model]


@asynccontextmanager
async def dispatching(settings: DispatcherSettings, redis: Redis, holder: str, clock: Clock) -> AsyncIterator[Dispatch]:
    """The role with a cell view of its own, for as long as the block runs."""
    cell = Cell(redis, settings.keys, clock)
    dispatch = Dispatch(settings, redis, cell, holder, clock)
    loops = (cell.run(settings.refresh_s), dispatch.run(), dispatch.listen())
    dispatch.tasks = [asyncio.create_task(loop) for loop in loops]
    try:
        yield dispatch
    finally:
        await stop_all(*dispatch.tasks)
