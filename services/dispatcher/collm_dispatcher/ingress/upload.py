"""Training data on its way to one replica: passed through as it comes, never into Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from collm_common.errors import InvalidRequest, PayloadTooLarge, RequestError, Unavailable
from collm_dispatcher.cell import Cell


class Uploads:
    """POST /v1/replicas/{id}/data; the replica's status and body come back unchanged."""

    def __init__(self, cell: Cell, max_bytes: int, timeout_s: float) -> None:
        self._cell, self._max_bytes, self._timeout = cell, max_bytes, aiohttp.ClientTimeout(total=timeout_s)

    async def handle(self, request: web.Request) -> web.Response:
        """Raises RequestError for an unknown replica, a body over the limit, or a replica that does not answer."""
        id_ = request.match_info["id"]
        member = self._cell.members.get(id_)
        if member is None:
            error = InvalidRequest(f"no replica {id_!r}", param="id", code="replica_not_found")
            error.status = 404
            raise error
        if not member.info.alive or not member.info.data_url:
            raise Unavailable(f"replica {id_} takes no data now", code="no_replica")
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large()
        headers = {"Content-Type": request.headers.get("Content-Type", "application/jsonl")}
        url = f"{member.info.data_url.rstrip('/')}/data"
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.post(url, data=self._bounded(request), headers=headers) as reply,
            ):
                return web.Response(status=reply.status, body=await reply.read(), content_type=reply.content_type)
        except RequestError:
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            if isinstance(error.__cause__, RequestError):
                raise error.__cause__ from None
            raise Unavailable(f"replica {id_} does not answer: {error}", code="no_replica") from error

    async def _bounded(self, request: web.Request) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in request.content.iter_any():
                size += len(chunk)
                if size > self._max_bytes:
                    raise self._too_large()
                yield chunk
        except web.RequestPayloadError as error:
            raise InvalidRequest(f"the body cannot be read: {error}", param="body") from error

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"body is over the limit of {self._max_bytes} bytes", param="body")
