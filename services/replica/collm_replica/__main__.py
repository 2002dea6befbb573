"""`python -m collm_replica`: run one replica until SIGTERM or SIGINT, then drain it."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

import uvloop

from collm_common import logs
from collm_common.broker import connection
from collm_common.clock import SystemClock
from collm_common.errors import CollmError
from collm_common.settings import load
from collm_replica.settings import ReplicaSettings
from collm_replica.supervisor import Supervisor


async def run(settings: ReplicaSettings) -> None:
    """One replica's whole life."""
    async with connection(settings.redis_url) as redis:
        supervisor = Supervisor(settings, redis, SystemClock())
        for wanted in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(wanted, supervisor.stop.set)
        await supervisor.run()


def main() -> None:
    """Exit status 0 after a drain, 2 for wrong settings, 1 when the replica cannot run."""
    try:
        settings = load(ReplicaSettings, "replica")
    except CollmError as error:
        print(f"collm-replica: {error}", file=sys.stderr)
        sys.exit(2)
    logs.setup(f"replica {settings.id}", settings.log_level)
    try:
        uvloop.run(run(settings))
    except CollmError as error:
        logging.getLogger(__name__).error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
