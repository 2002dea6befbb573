"""A replica that starts before its broker can be used."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from collm_common.broker import connection
from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_common.messages import Done
from collm_common.registry import Registry
from collm_replica.supervisor import Supervisor
from tests.replica.support import replies, request, send
from tests.replica.test_supervisor import options
from tests.support.broker import Broker
from tests.support.waiting import eventually


@pytest.fixture
def late() -> Iterator[Broker]:
    """One that nobody has started yet."""
    server = Broker()
    yield server
    server.close()


@pytest.mark.parametrize("trouble", ["not there", "no memory", "damaged"])
async def test_the_model_is_loaded_once_however_long_the_broker_takes(
    keys: Keys,
    late: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    trouble: str,
) -> None:
    """A model that is loaded again and again, with a traceback each, until the broker is ready or restarts run out."""
    async with connection(late.url) as redis:
        if trouble != "not there":
            late.start()
        if trouble == "no memory":
            await redis.config_set("maxmemory", 1)
        if trouble == "damaged":
            await redis.set(keys.adapters, "x")
        supervisor = Supervisor(options(monkeypatch, late, tmp_path), redis, SystemClock())
        task = asyncio.create_task(supervisor.run())
        await eventually(lambda: supervisor._inference.child is not None, within_s=60)
        first = supervisor._inference.child
        assert first is not None
        if trouble == "not there":
            await eventually(lambda: "ready to serve after" in capfd.readouterr().err, within_s=60)
            late.start()
        if trouble == "no memory":
            await eventually(first.ready.done, within_s=60)
            await redis.config_set("maxmemory", 0)
        await eventually(lambda: _ready(redis, keys), within_s=60)
        await send(redis, keys, request())
        await eventually(lambda: _answered(redis, keys))
        assert supervisor._inference.child is first
        supervisor.stop.set()
        await asyncio.wait_for(task, 30)


async def _ready(redis: Redis, keys: Keys) -> bool:
    return any(info.ready for info in (await Registry(redis, keys).replicas()).values())


async def _answered(redis: Redis, keys: Keys) -> bool:
    return any(isinstance(reply, Done) for reply in await replies(redis, keys))
