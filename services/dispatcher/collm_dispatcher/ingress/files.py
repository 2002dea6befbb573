"""Files of training data: lines dealt out to the replicas of a model; what Redis keeps says where from, not what."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

import aiohttp
from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError
from redis.asyncio import Redis

from collm_common.errors import InvalidRequest, PayloadTooLarge, RequestError, Unavailable
from collm_common.keys import Keys
from collm_dispatcher.cell import Cell
from collm_dispatcher.ingress.exchange import SlowBody
from collm_dispatcher.ingress.listing import Page, listed

PURPOSE = "fine-tune"
CHUNK = 1 << 16


class UnknownFile(RequestError):
    """No such file was uploaded."""

    status = 404
    type = "invalid_request_error"
    code = "file_not_found"


class Files:
    """POST /v1/files, GET /v1/files, GET /v1/files/{id}. A file counts once every replica has stored its lines."""

    def __init__(
        self, redis: Redis, keys: Keys, cell: Cell, models: tuple[str, ...], max_bytes: int, timeout_s: float
    ) -> None:
        self._redis, self._keys, self._cell, self._models = redis, keys, cell, models
        self._max_bytes, self._timeout_s = max_bytes, timeout_s

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Its routes."""
        router.add_post("/v1/files", self._create)
        router.add_get("/v1/files", self._list)
        router.add_get("/v1/files/{id}", self._get)

    async def find(self, id_: str) -> dict[str, str]:
        """What is known of a file. Raises UnknownFile."""
        row = await self._redis.hgetall(self._keys.file(id_))
        if not row:
            raise UnknownFile(f"no file {id_[:80]!r}", param="training_file")
        return {name.decode(): value.decode() for name, value in row.items()}

    async def _create(self, request: web.Request) -> web.StreamResponse:
        try:
            async with asyncio.timeout(self._timeout_s):
                fields, name, data = await self._read(request)
        except TimeoutError as error:
            raise SlowBody(f"the body did not arrive within {self._timeout_s:g} s", param="body") from error
        except (ValueError, aiohttp.ClientError, HttpProcessingError, web.RequestPayloadError) as error:
            raise InvalidRequest(f"the body is no multipart form: {error}", param="body") from error
        if fields.get("purpose") != PURPOSE:
            raise InvalidRequest(f"purpose: must be {PURPOSE}", param="purpose")
        if data is None:
            raise InvalidRequest("file: is missing", param="file")
        model = self._model(fields.get("model"))
        samples = await self._deal(model, data)
        id_, now = f"file-{uuid.uuid4().hex[:24]}", int(time.time())
        row = {"filename": name, "bytes": len(data), "created_at": now, "model": model, "samples": samples}
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._keys.file(id_), mapping=row)
            pipe.zadd(self._keys.files, {id_: now})
            await pipe.execute()
        return web.json_response(_shape(id_, await self.find(id_)))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        page = Page.of(request.query)
        ids, more = await listed(self._redis, self._keys.files, page)
        data = [_shape(id_, await self.find(id_)) for id_ in ids]
        return web.json_response(page.envelope(data, more))

    async def _get(self, request: web.Request) -> web.StreamResponse:
        id_ = request.match_info["id"]
        return web.json_response(_shape(id_, await self.find(id_)))

    async def _read(self, request: web.Request) -> tuple[dict[str, str], str, bytes | None]:
        if not request.content_type.startswith("multipart/"):
            raise InvalidRequest("the body must be a multipart form with purpose and file", param="body")
        fields: dict[str, str] = {}
        name, data = "", None
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader):
                raise InvalidRequest("the form holds another form", param="body")
            content = await self._bounded(part)
            if part.name == "file":
                name, data = _text(part.filename or "file")[:255], content
            elif part.name:
                fields[part.name] = content[:256].decode(errors="replace")
        return fields, name, data

    async def _bounded(self, part: BodyPartReader) -> bytes:
        found = bytearray()
        while chunk := await part.read_chunk(CHUNK):
            found += chunk
            if len(found) > self._max_bytes:
                raise PayloadTooLarge(f"file: is over the limit of {self._max_bytes} bytes", param="file")
        return bytes(found)

    def _model(self, asked: str | None) -> str:
        if asked is None and len(self._models) == 1:
            return self._models[0]
        if asked not in self._models:
            raise InvalidRequest(f"model: say which of {', '.join(self._models)} the file is for", param="model")
        return asked

    async def _deal(self, model: str, data: bytes) -> int:
        """Check all shares, then store all; the number of samples."""
        places = [
            f"{member.info.data_url.rstrip('/')}/data"
            for _, member in sorted(self._cell.members.items())
            if member.info.model == model and member.info.alive and member.info.data_url
        ]
        if not places:
            raise Unavailable(f"no replica of {model} takes data now", code="no_replica")
        shares = [
            (place, share) for place, share in zip(places, split(data, len(places)), strict=True) if share.strip()
        ]
        if not shares:
            raise InvalidRequest("file: has no samples, one JSON object a line", param="file")
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for query in ({"check": "1"}, {}):
                counts = await asyncio.gather(*(send(session, place, share, query) for place, share in shares))
        return sum(counts)


def _text(header: str) -> str:
    """Without the bytes of a header that are no UTF-8, which Redis would not take."""
    return header.encode(errors="replace").decode()


def split(data: bytes, shares: int) -> list[bytes]:
    """Line i goes to share i mod `shares`; the others have an empty line there, so that errors name the right one."""
    lines = data.split(b"\n")
    return [b"\n".join(line if i % shares == share else b"" for i, line in enumerate(lines)) for share in range(shares)]


async def send(
    session: aiohttp.ClientSession, url: str, data: bytes, query: dict[str, str], field: str = "file"
) -> int:
    """How many samples a replica took. Raises Unavailable, or InvalidRequest about `field`."""
    try:
        async with session.post(url, data=data, params=query) as reply:
            body: dict[str, Any] = await reply.json()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise Unavailable(f"a replica does not take its lines: {error}", code="no_replica") from error
    if reply.status == 200:
        return int(body["samples"])
    if reply.status < 500:
        raise InvalidRequest(f"{field}: {body['error']['message']}", param=field, code="invalid_data")
    raise Unavailable("a replica does not take its lines", code="no_replica")


def _shape(id_: str, row: dict[str, str]) -> dict[str, Any]:
    return {
        "id": id_,
        "object": "file",
        "bytes": int(row["bytes"]),
        "created_at": int(row["created_at"]),
        "filename": row["filename"],
        "purpose": PURPOSE,
        "status": "processed",
        "collm": {"model": row["model"], "samples": int(row["samples"])},
    }
