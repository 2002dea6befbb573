"""Work that outlives a broker that is away."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from collm_common.broker import AWAY
from collm_common.clock import Clock, checkpoint
from collm_common.trouble import TROUBLES


async def once(what: str, step: Callable[[], Awaitable[object]], clock: Clock) -> None:
    """Run `step` until it gets through; when the broker is away or refuses, wait a moment first."""
    while True:
        try:
            await step()
        except AWAY as error:
            pause_s = TROUBLES.tell(what, error)
            checkpoint()
            await clock.sleep(pause_s)
        else:
            return


async def forever(what: str, step: Callable[[], Awaitable[object]], clock: Clock) -> None:
    """Repeat `step` like this."""
    while True:
        await once(what, step, clock)
        checkpoint()
