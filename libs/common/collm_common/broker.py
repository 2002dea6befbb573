"""The connection to Redis or Valkey: retries with backoff, deadlines on every command, one error for "away"."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import redis.exceptions as failures
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from collm_common import sentinel
from collm_common.clock import Clock, SystemClock
from collm_common.errors import BrokerError, BrokerFault, SettingsError
from collm_common.trouble import TROUBLES, fault

AWAY = (
    failures.ConnectionError,
    failures.TimeoutError,
    failures.ResponseError,
    # Of a connection that was lost between WATCH and EXEC: whether a watched key changed is not known.
    failures.WatchError,
    OSError,
)
"""The broker cannot be reached, or refuses: `trouble.fault` tells whether waiting helps."""
BLOCK_S = 1.0
COMMAND_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 256
CANCEL_AGAIN_S = 0.2

T = TypeVar("T")


class _Torn(AbstractConnection):  # type: ignore[misc]
    """uvloop calls a connection that closes under a command a RuntimeError, which nobody would try again."""

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        try:
            await super().send_packed_command(*args, **kwargs)
        except RuntimeError as error:
            raise failures.ConnectionError(str(error)) from error


def connect(url: str) -> Redis:
    """A client with bytes replies. A command is tried four times over about a second before it counts as failed.

    At most MAX_CONNECTIONS commands are under way; of a larger burst each waits for its turn within its deadline.
    `url` is one of redis-py's, or that of Sentinels (`sentinel.FORM`). Raises SettingsError.
    """
    make = sentinel.pool if url.startswith(f"{sentinel.SCHEME}:") else BlockingConnectionPool.from_url
    try:
        pool = make(
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=COMMAND_TIMEOUT_S,
            protocol=2,
            decode_responses=False,
            socket_timeout=COMMAND_TIMEOUT_S + BLOCK_S,
            socket_connect_timeout=COMMAND_TIMEOUT_S,
            health_check_interval=15,
            retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 3),
            retry_on_error=[failures.BusyLoadingError],
        )
    except ValueError as error:
        raise SettingsError(f"COLLM_REDIS_URL (or --redis), {url.rpartition('@')[2]}: {error}") from error
    pool.connection_class = type("Connection", (_Torn, pool.connection_class), {})
    return Redis.from_pool(pool)


@asynccontextmanager
async def connection(url: str) -> AsyncIterator[Redis]:
    """`connect`, closed at the end."""
    client = connect(url)
    try:
        yield client
    finally:
        await client.aclose()


async def patiently(call: Callable[[], Awaitable[T]], deadline_s: float, clock: Clock | None = None) -> T:
    """Repeat an idempotent call while the broker is away, at most `deadline_s` seconds; then BrokerError.

    Raises BrokerFault at once when waiting would not help.
    """
    clock = clock or SystemClock()
    start, pause_s = clock.monotonic(), 0.05
    while True:
        try:
            return await call()
        except AWAY as error:
            if kind := fault(error):
                TROUBLES.faults[kind] += 1
                raise BrokerFault(f"the broker refuses: {kind}: {error}") from error
            if clock.monotonic() - start + pause_s > deadline_s:
                raise BrokerError(f"broker away for {deadline_s:g} s: {error}") from error
        await clock.sleep(pause_s)
        pause_s = min(1.0, pause_s * 2)


async def stop_all(*tasks: asyncio.Task[Any]) -> None:
    """Cancel background tasks and wait for them; their own errors surface here.

    A cancellation that arrives together with a reply can be swallowed by the client library, so it is repeated.
    """
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
