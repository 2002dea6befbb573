"""Files of training data: lines dealt out to the replicas of a model; what Redis keeps says where, not what."""

from __future__ import annotations

import asyncio
import hashlib
import time
from typing import Any

import aiohttp
import msgspec
from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError
from redis.asyncio import Redis

from collm_common.errors import Damaged, InvalidRequest, PayloadTooLarge, RequestError, Unavailable
from collm_common.keys import Keys
from collm_dispatcher.cell import Cell
from collm_dispatcher.ingress.exchange import SlowBody
from collm_dispatcher.ingress.gate import scope, tenant
from collm_dispatcher.ingress.listing import Page, legible, listed
from collm_dispatcher.ingress.shares import fetch, join, place, remove, send, split

PURPOSE = "fine-tune"
CHUNK = 1 << 16
MAX_LISTED = 10_000
MAX_FORM_BYTES = 65_536
"""For all that a form holds beside the file."""
PART_BYTES = 256
"""What a part counts even if it is empty: without it, a form could have any number of them."""


class UnknownFile(RequestError):
    """No such file was uploaded."""

    status = 404
    type = "invalid_request_error"
    code = "file_not_found"


class Files:
    """POST and GET /v1/files, GET and DELETE /v1/files/{id}, GET /v1/files/{id}/content.

    A file counts once every replica has stored its lines. Its id is made of what is in it: to upload a file again,
    after an answer that got lost, say, changes nothing.
    """

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
        router.add_delete("/v1/files/{id}", self._delete)
        router.add_get("/v1/files/{id}/content", self._content)

    async def find(self, id_: str, whose: str, param: str = "id") -> dict[str, str]:
        """What is known of a file of a tenant, "" in an open cell. Raises UnknownFile, Damaged."""
        key = self._keys.file(id_, whose)
        with legible(key):
            row = await self._redis.hgetall(key)
            if not row:
                raise UnknownFile(f"no file {id_[:80]!r}", param=param)
            found = {name.decode(): value.decode() for name, value in row.items()}
            _ = found["model"]
        return found

    async def _told(self, id_: str, whose: str) -> dict[str, Any]:
        row = await self.find(id_, whose)
        with legible(self._keys.file(id_, whose)):
            return _shape(id_, row)

    async def _holders(self, id_: str, whose: str) -> list[str]:
        row = await self.find(id_, whose)
        with legible(self._keys.file(id_, whose)):
            return _replicas(row)

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
        id_, now = _id(model, tenant(request), data), int(time.time())
        replicas, samples = await self._deal(model, data, id_)
        row = {
            "filename": name,
            "bytes": len(data),
            "created_at": now,
            "model": model,
            "samples": samples,
            "replicas": msgspec.json.encode(replicas),
        }
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hset(self._keys.file(id_, scope(request)), mapping=row)
            pipe.zadd(self._keys.files(scope(request)), {id_: now})
            await pipe.execute()
        return web.json_response(await self._told(id_, scope(request)))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        page = Page.of(request.query, MAX_LISTED, MAX_LISTED)
        if request.query.get("purpose", PURPOSE) != PURPOSE:
            return web.json_response(page.envelope([], False))
        ids, more = await listed(self._redis, self._keys.files(scope(request)), page)
        data = []
        for id_ in ids:
            try:
                data.append(await self._told(id_, scope(request)))
            except (UnknownFile, Damaged):
                continue
        return web.json_response(page.envelope(data, more))

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self._told(request.match_info["id"], scope(request)))

    async def _content(self, request: web.Request) -> web.StreamResponse:
        """The lines in their order, fetched from the replicas; all of them, or an error that names who is away."""
        id_ = request.match_info["id"]
        replicas = await self._holders(id_, scope(request))
        async with self._session() as session:
            shares = await asyncio.gather(*(self._share(session, replica, id_) for replica in replicas))
        return web.Response(body=join(shares), content_type="application/jsonl")

    async def _share(self, session: aiohttp.ClientSession, replica: str, id_: str) -> bytes:
        found = await fetch(session, place(self._cell, replica), {"file": id_}) if replica else b""
        if found is None:
            raise UnknownFile(f"replica {replica} has its lines of {id_!r} no more", param="id")
        return found

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        """On every replica that has lines of it, or nothing is confirmed. What has been learnt from it stays."""
        id_ = request.match_info["id"]
        places = [place(self._cell, replica) for replica in await self._holders(id_, scope(request)) if replica]
        async with self._session() as session:
            await asyncio.gather(*(remove(session, each, {"file": id_}) for each in places))
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.unlink(self._keys.file(id_, scope(request)))
            pipe.zrem(self._keys.files(scope(request)), id_)
            await pipe.execute()
        return web.json_response({"id": id_, "object": "file", "deleted": True})

    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._timeout_s))

    async def _read(self, request: web.Request) -> tuple[dict[str, str], str, bytes | None]:
        if not request.content_type.startswith("multipart/"):
            raise InvalidRequest("the body must be a multipart form with purpose and file", param="body")
        fields: dict[str, str] = {}
        name, data, left = "", None, self._max_bytes + MAX_FORM_BYTES
        async for part in await request.multipart():
            if not isinstance(part, BodyPartReader):
                raise InvalidRequest("the form holds another form", param="body")
            content = await self._bounded(part, left)
            left -= len(content) + PART_BYTES
            if part.name == "file":
                name, data = _text(part.filename or "file")[:255], content
            elif part.name:
                fields[part.name] = content[:256].decode(errors="replace")
        return fields, name, data

    async def _bounded(self, part: BodyPartReader, left: int) -> bytes:
        """The part; `left` is what the whole form may still hold."""
        found = bytearray()
        while chunk := await part.read_chunk(CHUNK):
            found += chunk
            if len(found) > self._max_bytes:
                raise PayloadTooLarge(f"file: is over the limit of {self._max_bytes} bytes", param="file")
            if len(found) > left:
                break
        if len(found) > left:
            most = self._max_bytes + MAX_FORM_BYTES
            raise PayloadTooLarge(f"body: the form is over the limit of {most} bytes", param="body")
        return bytes(found)

    def _model(self, asked: str | None) -> str:
        if asked is None and len(self._models) == 1:
            return self._models[0]
        if asked not in self._models:
            raise InvalidRequest(f"model: say which of {', '.join(self._models)} the file is for", param="model")
        return asked

    async def _deal(self, model: str, data: bytes, id_: str) -> tuple[list[str], int]:
        """Check all shares, then store all; whose each share is, "" where it is blank, and the number of samples."""
        replicas = [
            name
            for name, member in sorted(self._cell.members.items())
            if member.info.model == model and member.info.alive and member.info.data_url
        ]
        if not replicas:
            raise Unavailable(f"no replica of {model} takes data now", code="no_replica")
        shares = {
            replica: share for replica, share in zip(replicas, split(data, len(replicas)), strict=True) if share.strip()
        }
        if not shares:
            raise InvalidRequest("file: has no samples, one JSON object a line", param="file")
        sent = [(place(self._cell, replica), share) for replica, share in shares.items()]
        async with self._session() as session:
            for query in ({"check": "1"}, {"file": id_}):
                counts = await asyncio.gather(*(send(session, to, share, query) for to, share in sent))
        return [replica if replica in shares else "" for replica in replicas], sum(counts)


def _id(model: str, tenant: str, data: bytes) -> str:
    """Two tenants never share a file."""
    about = msgspec.json.encode([model, tenant])
    return f"file-{hashlib.sha256(about + data).hexdigest()[:24]}"


def _replicas(row: dict[str, str]) -> list[str]:
    """Whose share is which, "" for a blank one. Raises UnknownFile."""
    if "replicas" not in row:
        raise UnknownFile("where the lines of this file are was not kept", param="id")
    return msgspec.json.decode(row["replicas"], type=list[str])


def _text(header: str) -> str:
    """Without the bytes of a header that are no UTF-8, which Redis would not take."""
    return header.encode(errors="replace").decode()


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
