"""`python -m collm_coordinator`: run the coordinator until SIGTERM or SIGINT."""

from __future__ import annotations

from functools import partial

from collm_common.broker import connection
from collm_common.clock import SystemClock
from collm_common.process import no_arguments, serve, stop_on_signals
from collm_common.settings import load
from collm_coordinator.service import Coordinator
from collm_coordinator.settings import CoordinatorSettings


async def live(settings: CoordinatorSettings) -> None:
    """The coordinator's whole life."""
    async with connection(settings.redis_url) as redis:
        coordinator = Coordinator(settings, redis, SystemClock())
        stop_on_signals(coordinator.stop)
        if settings.metrics_port:
            coordinator.metrics.serve(settings.metrics_port)
        await coordinator.run()


def main() -> None:
    """Exit status as `serve` says."""
    no_arguments("coordinator", CoordinatorSettings)
    serve("coordinator", partial(load, CoordinatorSettings, "coordinator"), live)


if __name__ == "__main__":
    main()
