"""`python -m collm_launcher`: run the launcher until SIGTERM or SIGINT."""

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
from collm_launcher.service import Launcher
from collm_launcher.settings import LauncherSettings


async def run(settings: LauncherSettings) -> None:
    """The launcher's whole life."""
    async with connection(settings.redis_url) as redis:
        launcher = Launcher(settings, redis, SystemClock())
        for wanted in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(wanted, launcher.stop.set)
        await launcher.run()


def main() -> None:
    """Exit status 2 for wrong settings."""
    try:
        settings = load(LauncherSettings, "launcher")
    except CollmError as error:
        print(f"collm-launcher: {error}", file=sys.stderr)
        sys.exit(2)
    logs.setup("launcher", settings.log_level)
    uvloop.run(run(settings))


if __name__ == "__main__":
    main()
