"""`python -m collm_replica`: run one replica until SIGTERM or SIGINT, then drain it."""

from __future__ import annotations

from functools import partial

from collm_common.broker import connection
from collm_common.clock import SystemClock
from collm_common.process import no_arguments, serve, stop_on_signals
from collm_common.settings import load
from collm_replica.settings import ReplicaSettings
from collm_replica.supervisor import Supervisor


async def live(settings: ReplicaSettings) -> None:
    """The replica's whole life."""
    async with connection(settings.redis_url) as redis:
        supervisor = Supervisor(settings, redis, SystemClock())
        stop_on_signals(supervisor.stop)
        await supervisor.run()


def main() -> None:
    """Exit status as `serve` says."""
    no_arguments("replica", ReplicaSettings)
    serve("replica", partial(load, ReplicaSettings, "replica"), live, title=lambda settings: f"replica {settings.id}")


if __name__ == "__main__":
    main()
