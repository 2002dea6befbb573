"""The leadership of one model's streams: one leader, by a lease whose fencing token every release proves."""

from __future__ import annotations

import logging
from collections.abc import Collection
from contextlib import suppress

from redis.asyncio import Redis

from collm_common.broker import AWAY
from collm_common.clock import Clock, ticks
from collm_common.errors import FencedError
from collm_common.lease import Lease
from collm_common.trouble import TROUBLES
from collm_dispatcher.cell import Cell
from collm_dispatcher.originals import Originals
from collm_dispatcher.settings import DispatcherSettings
from collm_dispatcher.term import Term

log = logging.getLogger(__name__)


class Leader:
    """Reads a model's streams while it holds the lease `dispatch:{model}`; else it only tries to get it."""

    def __init__(
        self, model: str, settings: DispatcherSettings, redis: Redis, cell: Cell, holder: str, clock: Clock
    ) -> None:
        self.model, self._settings, self._redis, self._cell = model, settings, redis, cell
        self._holder, self._clock = holder, clock
        self._lease = Lease(redis, settings.keys, f"dispatch:{model}", holder, settings.lease_ttl_s)
        self._streams: dict[str, str] = {}
        self._originals = Originals(redis, settings.keys)
        self.term: Term | None = None

    @property
    def leads(self) -> bool:
        """Whether this process holds the lease, as far as it knows."""
        return self.term is not None

    @property
    def held(self) -> int:
        """Entries read and not released."""
        return len(self.term.backlog.queue) if self.term is not None else 0

    def follow(self, slos: Collection[str]) -> None:
        """Requests of these classes may exist. While it leads, it gives up only streams that it has removed itself."""
        found = {self._settings.keys.requests(self.model, slo): slo for slo in slos}
        self._streams = {**self._streams, **found} if self.leads else found
        if self.term is not None:
            for key in found:
                self.term.backlog.follow(key)

    async def prune(self) -> None:
        """While it leads: remove streams of no configured class that were not used for a while."""
        if self.term is None:
            return
        term, idle_s = self.term, self._settings.stream_idle_s

        async def remove(key: str) -> bool:
            removed = await self._originals.prune(self._lease.key, term.token, self.model, self._streams[key])
            if removed:
                del self._streams[key]
                log.info("removed the stream %s: unused for %g s", key, idle_s)
            return removed

        kept = {self._settings.keys.requests(self.model, slo) for slo in self._settings.class_names}
        with suppress(FencedError):
            await term.backlog.prune(idle_s, kept, remove)

    async def run(self) -> None:
        """For ever; gives the lease back at the end."""
        try:
            async for _ in ticks(self._settings.lease_ttl_s / 4, self._clock):
                asked_s = self._clock.monotonic()
                try:
                    token = await self._lease.hold()
                except AWAY as error:
                    TROUBLES.tell(f"lease of {self.model}", error)
                    continue
                if self.term is None or token != self.term.token:
                    await self._step_down()
                    if token is not None:
                        self._step_up(token)
                if self.term is not None:
                    self.term.held_s = asked_s
                    self.term.check()
        finally:
            await self._step_down()
            with suppress(*AWAY):
                await self._lease.release()

    def _step_up(self, token: str) -> None:
        log.info("leading %s as %s", self.model, token)
        self.term = Term(
            self.model, token, self._lease.key, self._settings, self._redis, self._cell, self._holder, self._clock
        )
        for key in self._streams:
            self.term.backlog.follow(key)
        self.term.start()

    async def _step_down(self) -> None:
        if self.term is not None:
            log.info("not leading %s any more", self.model)
            term, self.term = self.term, None
            await term.close()
