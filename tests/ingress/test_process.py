"""`python -m collm_dispatcher` as it is started in production."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from redis.asyncio import Redis

from collm_common.keys import Keys
from tests.dispatcher.support import replica
from tests.ingress.support import text
from tests.support.broker import Broker, free_port
from tests.support.waiting import eventually


@asynccontextmanager
async def process(*arguments: str, **settings: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Ended at the latest with the block."""
    own = {f"COLLM_{name}": value for name, value in settings.items()}
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "collm_dispatcher", *arguments, env={**os.environ, **own}, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def test_one_process_serves_and_drains(redis: Redis, keys: Keys, broker: Broker, tokenizer_folder: Path) -> None:
    """A start that works in tests only, or a SIGTERM that cuts an answer off."""
    port = free_port()
    settings = {
        "REDIS_URL": broker.url,
        "DISPATCHER_MODELS": f'{{"m": "{tokenizer_folder}"}}',
        "DISPATCHER_HOST": "127.0.0.1",
        "DISPATCHER_PORT": str(port),
    }
    async with (
        replica(redis, keys, "r1", lambda s, t: 0.01),
        process(**settings) as running,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
    ):

        async def ready() -> bool:
            try:
                async with http.get("/ready") as response:
                    return response.status == 200
            except aiohttp.ClientError:
                return False

        await eventually(ready, 60)

        async def ask() -> int:
            async with http.post("/v1/completions", json=text(max_tokens=60)) as response:
                await response.read()
                return response.status

        assert await ask() == 200
        open_ = asyncio.create_task(ask())
        await eventually(lambda: _busy(redis, keys))
        running.send_signal(signal.SIGTERM)
        assert await open_ == 200
        assert await asyncio.wait_for(running.wait(), 20) == 0


async def _busy(redis: Redis, keys: Keys) -> bool:
    return bool(await redis.xlen(keys.subflow("r1")))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, b"COLLM_DISPATCHER_MODELS"),
        ({"DISPATCHER_MODELS": '{"m": "x"}', "DISPATCHER_PORT": "x"}, b"COLLM_DISPATCHER_PORT"),
        ({"DISPATCHER_TYPO": "1"}, b"COLLM_DISPATCHER_TYPO"),
    ],
)
async def test_wrong_settings_stop_the_start_and_are_named(settings: dict[str, str], named: bytes) -> None:
    """A process that runs without what it was told."""
    async with process(**settings) as running:
        _, errors = await running.communicate()
    assert running.returncode == 2
    assert named in errors


async def test_a_model_without_a_tokenizer_stops_the_start(broker: Broker, tmp_path: Path) -> None:
    """An ingress that answers every request with an internal error."""
    models = f'{{"m": "{tmp_path / "nothing"}"}}'
    async with process(REDIS_URL=broker.url, DISPATCHER_MODELS=models, DISPATCHER_PORT=str(free_port())) as running:
        _, errors = await running.communicate()
    assert running.returncode == 1
    assert b"m: " in errors


async def test_a_process_that_waits_for_its_broker_ends_when_it_is_told_to(tokenizer_folder: Path) -> None:
    """A SIGTERM that is heard only once there is a broker: the container is killed after its grace."""
    settings = {
        "REDIS_URL": f"redis://127.0.0.1:{free_port()}/0",
        "DISPATCHER_MODELS": f'{{"m": "{tokenizer_folder}"}}',
        "DISPATCHER_PORT": str(free_port()),
    }
    async with process(**settings) as running:
        assert running.stderr is not None
        async with asyncio.timeout(60):
            while b"classes: broker away" not in await running.stderr.readline():
                pass
            running.send_signal(signal.SIGTERM)
            await running.communicate()
        assert running.returncode == 0
