"""A broker that Sentinels watch: every connection goes to the primary that they name, whichever that is by now."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import redis.exceptions as failures
from msgspec import Struct
from redis.asyncio.connection import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff

SCHEME = "redis+sentinel"
FORM = f"{SCHEME}://USER:PASSWORD@HOST:PORT,HOST:PORT/NAME/DATABASE"
PORT = 26379
ASK_S = 1.0
ASK_EVERY_S = 1.0


class Watched(Struct, frozen=True):
    """What such a URL says: the Sentinels, the name by which they know the primary, and how to log in to either."""

    sentinels: tuple[tuple[str, int], ...]
    name: str
    primary: dict[str, Any]
    sentinel: dict[str, Any]

    @classmethod
    def of(cls, url: str) -> Watched:
        """Reads FORM; `?username=` and `?password=` are those of the Sentinels. Raises ValueError."""
        parts = urlsplit(url)
        login, _, nodes = parts.netloc.rpartition("@")
        user, _, password = login.partition(":")
        name, _, database = parts.path.removeprefix("/").partition("/")
        own = dict(parse_qsl(parts.query, keep_blank_values=True))
        if not nodes or not name or not (database or "0").isdecimal() or own.keys() - {"username", "password"}:
            raise ValueError(f"a URL of Sentinels has the form {FORM}[?username=…&password=…]")
        primary = {"username": unquote(user) or None, "password": unquote(password) or None, "db": int(database or 0)}
        return cls(tuple(map(_node, nodes.split(","))), name, primary, own)


def _node(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(f"{text!r} is no HOST:PORT of a Sentinel")
    return parts.hostname, parts.port or PORT


class _Pool(SentinelConnectionPool, BlockingConnectionPool):  # type: ignore[misc]
    """While it is used, it asks once every ASK_EVERY_S, beside the commands, who the primary is.

    A demoted primary may go on taking writes, which are lost, until a Sentinel gets to it; connections to it are not
    used any more from the next answer on.
    """

    _asking: asyncio.Task[None] | None = None
    _asked_s = float("-inf")

    async def get_connection(self, *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() - self._asked_s > ASK_EVERY_S and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._ask())
        return await super().get_connection(*args, **kwargs)

    async def release(self, connection: Any) -> None:
        if self.master_address not in (None, (connection.host, connection.port)):
            connection.mark_for_reconnect()
        await super().release(connection)

    async def aclose(self) -> None:
        """Closes what it asks, too."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await super().aclose()
        await self.sentinel_manager.aclose()

    async def _ask(self) -> None:
        """Without an answer, what it has stays as it is."""
        with suppress(failures.RedisError, OSError):
            await self.get_master_address()
        self._asked_s = time.monotonic()


def pool(url: str, **options: Any) -> BlockingConnectionPool:
    """Connections to the primary. A Sentinel that does not answer within ASK_S is passed over. Raises ValueError."""
    watched = Watched.of(url)
    asking = {"socket_timeout": ASK_S, "socket_connect_timeout": ASK_S, "protocol": 2, "retry": Retry(NoBackoff(), 0)}
    manager = Sentinel(watched.sentinels, sentinel_kwargs=asking | watched.sentinel)
    options |= watched.primary | {"connection_class": SentinelManagedConnection}
    return _Pool(watched.name, manager, **options)
