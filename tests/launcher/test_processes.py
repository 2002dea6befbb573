"""Launcher and coordinator as processes: they lead, stop cleanly on SIGTERM, and refuse wrong settings by name."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest
from redis.asyncio import Redis

from collm_common.keys import Keys
from tests.support.broker import Broker
from tests.support.waiting import eventually


async def start(service: str, broker: Broker, **settings: str) -> asyncio.subprocess.Process:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("COLLM_")}
    environment |= {"COLLM_REDIS_URL": broker.url, **settings}
    arguments = [sys.executable, "-m", f"collm_{service}"]
    return await asyncio.create_subprocess_exec(*arguments, env=environment, stderr=asyncio.subprocess.PIPE)


async def end(process: asyncio.subprocess.Process) -> tuple[int, str]:
    async with asyncio.timeout(30):
        _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode()


@pytest.mark.parametrize("service", ["launcher", "coordinator"])
async def test_a_service_leads_until_it_is_told_to_stop(redis: Redis, keys: Keys, broker: Broker, service: str) -> None:
    """A service that cannot be started by its name, or that keeps the lease when it is gone."""
    process = await start(service, broker)
    try:
        await eventually(lambda: redis.exists(keys.lease(service)), within_s=60)
        process.send_signal(signal.SIGTERM)
        status, said = await end(process)
        assert status == 0, said
        assert not await redis.exists(keys.lease(service))
    finally:
        if process.returncode is None:
            process.kill()
            await end(process)


@pytest.mark.parametrize(
    ("service", "variable", "value"),
    [
        ("launcher", "COLLM_LAUNCHER_RULES", '{"rounds": 0}'),
        ("launcher", "COLLM_LAUNCHER_RULES", '{"strategy": "average"}'),
        ("launcher", "COLLM_LAUNCHER_RULES", '{"strategy": "fedprox"}'),
        ("launcher", "COLLM_LAUNCHER_IDLE", '{"windw": 3}'),
        ("launcher", "COLLM_LAUNCHER_TICKS", "1"),
        ("coordinator", "COLLM_COORDINATOR_SLO", '{"name": "x", "e2e": 1}'),
    ],
)
async def test_a_wrong_setting_stops_the_start_and_is_named(
    broker: Broker, service: str, variable: str, value: str
) -> None:
    """A typing error that becomes a default in silence."""
    status, said = await end(await start(service, broker, **{variable: value}))
    assert status == 2
    assert variable in said
    assert "Traceback" not in said
