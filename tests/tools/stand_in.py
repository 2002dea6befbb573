"""Quick stand-ins for the four services, started as processes under the real names, to test `up` and `demo` with.

The replicas register and report, the launcher tells the story of a job, the dispatcher answers with quality.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from aiohttp import web
from redis.asyncio import Redis

from collm_common.broker import connection
from collm_common.keys import Keys
from collm_common.messages import encode, kind
from collm_common.registry import Registry
from collm_common.streams import append
from tests.tools import cell

KEYS = Keys()
MAIN = "from tests.tools.stand_in import main\nmain('{service}')\n"
MODELS = "def resolve(source, cache_dir):\n    return source\n"


def write_packages(folder: Path) -> Path:
    """Packages that shadow the services when `folder` comes first on the path."""
    for service in ("dispatcher", "replica", "launcher", "coordinator"):
        package = folder / f"collm_{service}"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(MAIN.format(service=service))
    (folder / "collm_replica" / "models.py").write_text(MODELS)
    return folder


def main(service: str) -> None:
    """Play one service until SIGTERM."""
    asyncio.run(_play(service))


async def _play(service: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with connection(os.environ["COLLM_REDIS_URL"]) as redis:
        match service:
            case "dispatcher":
                await _listen(int(os.environ["COLLM_DISPATCHER_PORT"]))
            case "replica":
                await _join(redis, os.environ["COLLM_REPLICA_ID"])
            case "launcher":
                await _tell(redis)
        await stop.wait()
    sys.exit(0)


async def _listen(port: int) -> int:
    runner = web.AppRunner(cell.Service().app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return int(runner.addresses[0][1])


async def _join(redis: Redis, replica: str) -> None:
    data_url = f"http://127.0.0.1:{await _listen(0)}"
    await Registry(redis, KEYS).register(cell.info(replica, data_url=data_url), 600)
    for report in cell.reports(time.time()):
        if report.replica == replica:
            await append(redis, KEYS.telemetry, kind(report), replica, encode(report))


async def _tell(redis: Redis) -> None:
    await redis.hset(KEYS.adapter("desk"), mapping={"model": os.environ["STAND_IN_MODEL"], "version": 0})
    await redis.sadd(KEYS.adapters, "desk")
    for event in cell.events(time.time()):
        await append(redis, KEYS.events, kind(event), "e", encode(event))
