"""Keeps one child running: start, wait for its first real step, watch it, restart it with backoff and a limit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from collm_common.clock import Clock
from collm_common.errors import ModelError
from collm_replica.channel import Ready, ToChild
from collm_replica.child import Child
from collm_replica.settings import ReplicaSettings

log = logging.getLogger(__name__)

STABLE_S = 60.0
LOOK_S = 0.25


class Keeper:
    """`spawn` makes a child, `ready` and `died` are told of its first step and its end (never a wanted end)."""

    def __init__(
        self,
        settings: ReplicaSettings,
        clock: Clock,
        spawn: Callable[[], Awaitable[Child]],
        ready: Callable[[Ready], Awaitable[None]],
        died: Callable[[str], Awaitable[None]],
    ) -> None:
        self._settings, self._clock = settings, clock
        self._spawn, self._ready, self._died = spawn, ready, died
        self.child: Child | None = None
        self.ending = False
        self._renewing = False

    async def send(self, message: ToChild) -> bool:
        """To the child that lives now; whether there was one."""
        return self.child is not None and await self.child.send(message)

    def trouble(self, still_s: float) -> str:
        """Why the child does no work: it has made no first step, or none for `still_s` seconds. "" while it does."""
        child = self.child
        if child is None or not child.ready.done() or child.ready.cancelled():
            return "not ready"
        if child.still_for() > still_s:
            return f"no progress for {child.still_for():.0f} s"
        return "shutting down" if self.ending else ""

    def renew(self) -> None:
        """End this child for the sake of another one, which is no death. One that is about to be made stays."""
        if self.child is not None and self.child.process is not None and self.child.process.returncode is None:
            self._renewing = True
            self.child.kill()

    async def run(self) -> None:
        """Until a wanted end (`ending`); ModelError after more deaths in a row than the limit allows."""
        deaths = 0
        while not self.ending:
            started_s = self._clock.monotonic()
            self.child = await self._spawn()
            why = await self._live(self.child)
            if self.ending:
                return
            if self._renewing:
                self._renewing = False
                continue
            deaths = 1 if self._clock.monotonic() - started_s > STABLE_S else deaths + 1
            log.error("%s died: %s", self.child.module, why)
            await self._died(why)
            if deaths > self._settings.restart_limit:
                raise ModelError(f"{self.child.module} died {deaths} times in a row, last: {why}")
            await self._clock.sleep(min(30.0, self._settings.restart_backoff_s * 2 ** (deaths - 1)))

    async def end(self, within_s: float) -> None:
        """Wait for the child to leave by itself, then kill it."""
        self.ending = True
        if self.child is None or self.child.process is None or self.child.process.returncode is not None:
            return
        try:
            await asyncio.wait_for(self.child.process.wait(), within_s)
        except TimeoutError:
            if within_s:
                log.warning("%s did not end within %g s: killed", self.child.module, within_s)
            self.child.kill()

    async def _live(self, child: Child) -> str:
        """The whole life of one child; returns why it ended."""
        await child.start()
        death = asyncio.create_task(child.wait())
        try:
            first: list[asyncio.Future[Any]] = [death, child.ready]
            await asyncio.wait(first, timeout=self._settings.start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                return f"exit status {death.result()} while starting"
            if not child.ready.done():
                return f"not ready after {self._settings.start_timeout_s:g} s"
            await self._ready(child.ready.result())
            while not death.done():
                await asyncio.wait([death], timeout=LOOK_S)
                if child.still_for() > self._settings.stall_s:
                    return f"no progress for {self._settings.stall_s:g} s"
            return f"exit status {death.result()}"
        finally:
            child.kill()
            await death
