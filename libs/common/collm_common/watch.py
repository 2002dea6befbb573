"""The loop of a service of which one leads: it hears telemetry and events, and acts at every tick."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from collm_common import messages
from collm_common.broker import AWAY
from collm_common.clock import Clock
from collm_common.errors import FencedError, MessageError
from collm_common.lease import Lease
from collm_common.messages import AnyMessage
from collm_common.streams import Entry, Tail
from collm_common.trouble import TROUBLES, fault

log = logging.getLogger(__name__)

BATCH = 500
LEAST_WAIT_S = 0.01


class Watch:
    """Holds `lease`, or waits for it. Its owner reads the present in `lead`, which returns what to hear from there on.

    `hear` gets each entry with its message, `tick` the time (Unix seconds) about every `tick_s`. Whatever was missed
    while the broker was away or another led is read again by `lead`.
    """

    def __init__(
        self,
        lease: Lease,
        clock: Clock,
        tick_s: float,
        lead: Callable[[], Awaitable[Tail]],
        hear: Callable[[Entry, AnyMessage], Awaitable[None]],
        tick: Callable[[float], Awaitable[None]],
    ) -> None:
        self._lease, self._clock, self._tick_s = lease, clock, tick_s
        self._lead, self._hear, self._tick = lead, hear, tick
        self._tail: Tail | None = None
        self._token: str | None = None
        self._next_tick_s = clock.monotonic()

    @property
    def leads(self) -> bool:
        """Whether this one holds the lease, as far as it knows, and has read what there was."""
        return self._tail is not None

    async def run(self, stop: asyncio.Event) -> None:
        """Until `stop`. A broker that is away, or a lost lease, costs only the time it lasts."""
        while not stop.is_set():
            try:
                await self._turn()
            except FencedError as error:
                log.warning("%s", error)
                self._tail = None
            except AWAY as error:
                self._tail = None
                pause_s = TROUBLES.tell("leading", error)
                if fault(error):
                    # Another may do better; and whoever looks at the lease sees that nobody does this work.
                    await self._give_up_lease()
                await self._clock.sleep(pause_s)
        self._tail = None
        await self._give_up_lease()

    async def _give_up_lease(self) -> None:
        self._token = None
        with contextlib.suppress(*AWAY):
            await self._lease.release()

    async def _turn(self) -> None:
        token = await self._lease.hold()
        if token is None or token != self._token:
            self._tail, self._token = None, token
        if token is None:
            await self._clock.sleep(min(self._tick_s, self._lease.ttl_s / 3))
            return
        if self._tail is None:
            self._tail = await self._lead()
        wait_s = min(self._lease.ttl_s / 4, self._next_tick_s - self._clock.monotonic())
        for entry in await self._tail.read(BATCH, max(LEAST_WAIT_S, wait_s)):
            await self._take(entry)
        if self._clock.monotonic() >= self._next_tick_s:
            self._next_tick_s = max(self._next_tick_s + self._tick_s, self._clock.monotonic())
            await self._tick(self._clock.now())

    async def _take(self, entry: Entry) -> None:
        try:
            message = messages.decode(entry.data)
        except MessageError as error:
            log.error("skipping entry %s of %s: %s", entry.entry_id, entry.key, error)
            return
        await self._hear(entry, message)
