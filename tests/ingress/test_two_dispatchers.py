"""Two dispatchers and two ingresses as processes on one broker: one is killed, or sleeps through the other's reign."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
from redis.asyncio import Redis

from collm_common.keys import Keys
from collm_dispatcher.settings import DispatcherSettings
from tests.dispatcher.support import lengths, offer, register, replica
from tests.ingress.support import text
from tests.replica.support import request
from tests.support.broker import Broker, free_port
from tests.support.processes import Process, process
from tests.support.waiting import eventually

LEASE = Keys().lease("dispatch:m")
ORIGINAL = Keys().requests("m", "s")


@asynccontextmanager
async def dispatchers(broker: Broker, folder: Path) -> AsyncIterator[dict[str, Process]]:
    """d1 and d2, with the settings of production."""
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(
                process(
                    folder / f"{name}.log",
                    "collm_dispatcher",
                    "--role",
                    "dispatch",
                    REDIS_URL=broker.url,
                    DISPATCHER_ID=name,
                )
            )
            for name in ("d1", "d2")
        }


async def leader(redis: Redis) -> str:
    """Who holds the lease; "" while nobody does."""
    return (await redis.get(LEASE) or b"").decode().partition("-")[0]


async def leads(redis: Redis, *names: str) -> bool:
    return await leader(redis) in names


async def test_a_killed_leader_is_followed_within_two_seconds(
    redis: Redis, keys: Keys, broker: Broker, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Streams that stand still for as long as a lease which nobody holds any more; requests stuck with the dead."""
    ports = [free_port(), free_port()]
    settings = {"DISPATCHER_MODELS": f'{{"m": "{tokenizer_folder}"}}', "DISPATCHER_HOST": "127.0.0.1"}
    async with AsyncExitStack() as stack:
        both = await stack.enter_async_context(dispatchers(broker, tmp_path))
        for port in ports:
            own = settings | {"REDIS_URL": broker.url, "DISPATCHER_PORT": str(port)}
            log = tmp_path / f"{port}.log"
            await stack.enter_async_context(process(log, "collm_dispatcher", "--role", "ingress", **own))
        await stack.enter_async_context(replica(redis, keys, "r1", lambda s, t: 0.01))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        for port in ports:
            await eventually(partial(_ready, http, port), 60)
        await eventually(partial(leads, redis, "d1", "d2"))
        open_ = [asyncio.create_task(_ask(http, ports[n % 2])) for n in range(24)]
        await eventually(lambda: _length(redis, keys.subflow("r1"), 4))
        dead = await leader(redis)
        await both.pop(dead).kill()
        # What a successor waits for at the most: the rest of the lease, and its own next try.
        assert await redis.pttl(LEASE) / 1000 + DispatcherSettings().lease_ttl_s / 4 < 2
        await eventually(partial(leads, redis, *both))
        open_ += [asyncio.create_task(_ask(http, ports[n % 2])) for n in range(4)]
        assert await asyncio.gather(*open_) == [(200, 20)] * 28


async def test_a_paused_leader_that_wakes_up_moves_nothing(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path
) -> None:
    """Two that release into the same replica, because one does not know how long it slept."""
    await register(redis, keys, infer_batch_max=1)
    await offer(redis, keys, *(request(f"q{n}") for n in range(3)))
    async with dispatchers(broker, tmp_path) as both:
        await eventually(lambda: _length(redis, keys.subflow("r1"), 1), 60)
        old = await leader(redis)
        (new,) = {*both} - {old}
        both[old].send(signal.SIGSTOP)
        await eventually(partial(leads, redis, new))
        # The new one stands still, so that whatever moves is moved by the old one.
        both[new].send(signal.SIGSTOP)
        await redis.pexpire(LEASE, 60_000)
        await redis.delete(keys.subflow("r1"))
        both[old].send(signal.SIGCONT)
        await eventually(lambda: both[old].said("not leading m any more"))
        assert await lengths(redis, keys, "r1") == [0]
        assert await redis.xlen(ORIGINAL) == 2
        both[new].send(signal.SIGCONT)
        await eventually(lambda: _length(redis, keys.subflow("r1"), 1))
        assert await leader(redis) == new


async def _ready(http: aiohttp.ClientSession, port: int) -> bool:
    try:
        async with http.get(f"http://127.0.0.1:{port}/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def _ask(http: aiohttp.ClientSession, port: int) -> tuple[int, int]:
    """Status, and output tokens."""
    body = text(max_tokens=20, ignore_eos=True)
    async with http.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as response:
        answer = await response.json()
    return response.status, answer.get("usage", {}).get("completion_tokens", 0)


async def _length(redis: Redis, key: str, wanted: int) -> bool:
    return int(await redis.xlen(key)) == wanted
