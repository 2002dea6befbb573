"""Clients that stall or send bodies which cannot be read, on a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from collm_common.errors import RequestError
from collm_dispatcher.ingress.exchange import Events, read_body

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def connected(handler: Handler) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A raw connection to a server that answers POST / with `handler`."""
    app = web.Application(client_max_size=1000)
    app.router.add_post("/", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1], limit=1024)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        await runner.cleanup()


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        (b"Content-Length: 10\r\n\r\nhalf", 408),
        (b"Content-Length: 99999999999\r\n\r\n{}", 413),
        (b"Transfer-Encoding: chunked\r\n\r\n" + b"400\r\n" + b"x" * 1024 + b"\r\n0\r\n\r\n", 413),
        (b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 400),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused_in_time(rest: bytes, status: int) -> None:
    """A client that keeps a connection for ever, or bad bytes that count as a failure of the server."""
    refused: asyncio.Future[RequestError] = asyncio.get_running_loop().create_future()

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            await read_body(request, 1000, within_s=0.1)
        except RequestError as error:
            refused.set_result(error)
        return web.Response()

    async with connected(handler) as (_, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\n" + rest)
        error = await asyncio.wait_for(refused, 10)
    assert (error.status, error.param) == (status, "body")


async def test_a_client_that_reads_nothing_has_left() -> None:
    """A stream that nobody reads and that keeps one of the places of its queue for ever."""
    left: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def handler(request: web.Request) -> web.StreamResponse:
        events = Events(request, stalled_s=0.1)
        try:
            while True:
                await events.send({"text": "x" * 100_000})
        except ConnectionResetError as error:
            left.set_result(str(error))
        return events.response

    async with connected(handler) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        await reader.readexactly(12)
        assert "read nothing" in await asyncio.wait_for(left, 20)
