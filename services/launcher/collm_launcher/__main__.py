"""`python -m collm_launcher`: run the launcher until SIGTERM or SIGINT."""

from __future__ import annotations

from functools import partial

from collm_common.broker import connection
from collm_common.clock import SystemClock
from collm_common.process import no_arguments, serve, stop_on_signals
from collm_common.settings import load
from collm_launcher.service import Launcher
from collm_launcher.settings import LauncherSettings


async def live(settings: LauncherSettings) -> None:
    """The launcher's whole life."""
    async with connection(settings.redis_url) as redis:
        launcher = Launcher(settings, redis, SystemClock())
        stop_on_signals(launcher.stop)
        await launcher.run()


def main() -> None:
    """Exit status as `serve` says."""
    no_arguments("launcher", LauncherSettings)
    serve("launcher", partial(load, LauncherSettings, "launcher"), live)


if __name__ == "__main__":
    main()
