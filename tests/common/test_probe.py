"""Health checks of containers, against a real broker and a real HTTP server."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from redis.asyncio import Redis

from collm_common import probe
from collm_common.keys import Keys
from collm_common.probe import Unwell
from tests.support.broker import Broker


async def test_a_lease_that_nobody_renews_is_unwell(
    redis: Redis, keys: Keys, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that counts as healthy because its process exists."""
    monkeypatch.setenv("COLLM_REDIS_URL", broker.url)
    for unless_away in (False, True):
        with pytest.raises(Unwell, match="nobody holds the lease launcher"):
            await probe.lease("launcher", unless_away)
    await redis.set(keys.lease("launcher"), "somebody", px=60_000)
    await probe.lease("launcher")


async def test_a_broker_that_is_away_is_unwell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback in place of the reason."""
    monkeypatch.setenv("COLLM_REDIS_URL", "redis://127.0.0.1:1/0")
    with pytest.raises(Unwell, match="broker away"):
        await probe.lease("launcher")
    # What starts a service again must not do it because of the broker.
    await probe.lease("launcher", unless_away=True)


async def test_a_failing_answer_is_unwell() -> None:
    """A check that is content with any answer, 503 included."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=int(request.match_info["status"]))

    app = web.Application()
    app.router.add_get("/{status}", answer)
    async with TestServer(app) as server:
        await asyncio.to_thread(probe.http, str(server.make_url("/200")))
        with pytest.raises(Unwell, match="503"):
            await asyncio.to_thread(probe.http, str(server.make_url("/503")))
