"""`python -m collm_coordinator`: run the coordinator until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import signal
import sys

import uvloop

from collm_common import logs
from collm_common.broker import connection
from collm_common.clock import SystemClock
from collm_common.errors import CollmError
from collm_common.settings import load
from collm_coordinator.service import Coordinator
from collm_coordinator.settings import CoordinatorSettings


async def run(settings: CoordinatorSettings) -> None:
    """The coordinator's whole life."""
    async with connection(settings.redis_url) as redis:
        coordinator = Coordinator(settings, redis, SystemClock())
        for wanted in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(wanted, coordinator.stop.set)
        await coordinator.run()


def main() -> None:
    """Exit status 2 for wrong settings."""
    try:
        settings = load(CoordinatorSettings, "coordinator")
    except CollmError as error:
        print(f"collm-coordinator: {error}", file=sys.stderr)
        sys.exit(2)
    logs.setup("coordinator", settings.log_level)
    uvloop.run(run(settings))


if __name__ == "__main__":
    main()
