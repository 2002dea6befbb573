"""The two ends of an HTTP exchange, each with a deadline: a client that stalls must not keep its place for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import web

from collm_common.errors import InvalidRequest, PayloadTooLarge, RequestError

BODY_S = 30.0
STALLED_S = 30.0


class SlowBody(RequestError):
    """The body did not arrive in time."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


async def read_body(request: web.Request, max_bytes: int, within_s: float = BODY_S) -> bytes:
    """The whole body. Raises PayloadTooLarge, SlowBody, or InvalidRequest if its encoding is broken."""
    too_large = PayloadTooLarge(f"body is over the limit of {max_bytes} bytes", param="body")
    if (request.content_length or 0) > max_bytes:
        raise too_large
    try:
        async with asyncio.timeout(within_s):
            return await request.read()
    except TimeoutError as error:
        raise SlowBody(f"the body did not arrive within {within_s:g} s", param="body") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise too_large from error
    except web.RequestPayloadError as error:
        raise InvalidRequest(f"the body cannot be read: {error}", param="body") from error


class Events:
    """A response of server-sent events."""

    def __init__(self, request: web.Request, stalled_s: float = STALLED_S) -> None:
        """A client that reads nothing for `stalled_s` seconds, while there is no more room on its line, has left."""
        self._request, self._stalled_s = request, stalled_s
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        self.started = False

    async def send(self, *chunks: dict[str, Any]) -> None:
        """An event each, in one piece on the line. Raises ConnectionResetError when the client is gone."""
        if chunks:
            await self._write(self.response.write, b"".join(_event(msgspec.json.encode(chunk)) for chunk in chunks))

    async def end(self) -> web.StreamResponse:
        """The last event."""
        await self._write(self.response.write_eof, _event(b"[DONE]"))
        return self.response

    async def text(self, data: str) -> None:
        """One event whose data is this, in one line. Raises as `send`."""
        await self._write(self.response.write, _event(data.encode()))

    async def _write(self, write: Callable[[bytes], Awaitable[None]], data: bytes) -> None:
        if not self.started:
            self.started = True
            await self.response.prepare(self._request)
        try:
            async with asyncio.timeout(self._stalled_s):
                await write(data)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError(f"its client read nothing for {self._stalled_s:g} s") from error


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
