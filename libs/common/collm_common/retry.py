"""Work that outlives a broker that is away."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from collm_common.broker import AWAY
from collm_common.clock import Clock, checkpoint

log = logging.getLogger(__name__)
PAUSE_S = 0.5


async def once(what: str, step: Callable[[], Awaitable[object]], clock: Clock) -> None:
    """Run `step` until it gets through; after a failed connection, wait a moment first."""
    while True:
        try:
            await step()
        except AWAY as error:
            log.warning("%s: broker away: %s", what, error)
            checkpoint()
            await clock.sleep(PAUSE_S)
        else:
            return


async def forever(what: str, step: Callable[[], Awaitable[object]], clock: Clock) -> None:
    """Repeat `step` like this."""
    while True:
        await once(what, step, clock)
        checkpoint()
