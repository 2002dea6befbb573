"""The replica's internal HTTP endpoint: training data comes here from the ingress, never through the broker."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import quote

from aiohttp import web

from collm_common.errors import DataError, ModelError
from collm_common.trouble import TROUBLES

UPLOADS, FEEDBACK = "uploads", "feedback"
NAME = re.compile(r"[A-Za-z0-9-]{1,128}")
MAX_NAME, MAX_FEEDBACK = 200, 10_000


class DataEndpoint:
    """POST /data (JSON lines; ?check only checks them), GET and DELETE /data, GET /digest, GET /health.

    Files land in `folder`/uploads, named by content. With ?file they are a share of the API's file of that id, and
    named by it; with ?request they are feedback on that request: they land in `folder`/feedback, in a folder of
    ?tenant, named by the request. What has such a name can be read and removed again.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        check: Callable[[str], int],
        digest: Callable[[], Awaitable[str]],
        trouble: Callable[[], str],
    ) -> None:
        """`check` counts samples or raises DataError; `trouble` says why nothing is served, "" if all is well."""
        self._folder, self._max_bytes, self._check, self._digest = folder, max_bytes, check, digest
        self._trouble = trouble
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (a free one for 0)."""
        app = web.Application(client_max_size=self._max_bytes)
        app.router.add_post("/data", self._upload)
        app.router.add_get("/data", self._get)
        app.router.add_delete("/data", self._delete)
        app.router.add_get("/digest", self._get_digest)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _upload(self, request: web.Request) -> web.Response:
        try:
            body = await request.read()
        except web.HTTPRequestEntityTooLarge:
            return _refuse(413, f"body is over the limit of {self._max_bytes} bytes", "body")
        try:
            path = None if "check" in request.query else self._place(request, body)
            count = await asyncio.to_thread(_store, path, body, self._check)
        except DataError as error:
            return _refuse(400, str(error), error.field)
        return web.json_response({"samples": count})

    async def _get(self, request: web.Request) -> web.StreamResponse:
        try:
            path = _named(self._folder, request)
        except DataError as error:
            return _refuse(400, str(error), error.field)
        if not path.is_file():
            return _refuse(404, "nothing of that name is stored here", "file")
        return web.FileResponse(path, headers={"Content-Type": "application/jsonl"})

    async def _delete(self, request: web.Request) -> web.Response:
        try:
            path = _named(self._folder, request)
        except DataError as error:
            return _refuse(400, str(error), error.field)
        found = path.is_file()
        path.unlink(missing_ok=True)
        return web.json_response({"deleted": int(found)})

    def _place(self, request: web.Request, body: bytes) -> Path:
        if request.query.keys() & {"file", "request"}:
            return _named(self._folder, request)
        return self._folder / UPLOADS / f"{hashlib.sha256(body).hexdigest()[:32]}.jsonl"

    async def _get_digest(self, _: web.Request) -> web.Response:
        try:
            return web.json_response({"digest": await self._digest()})
        except (ModelError, TimeoutError) as error:
            return _refuse(503, f"no digest: {error}", "")

    async def _health(self, _: web.Request) -> web.Response:
        if reason := self._trouble():
            return web.json_response({"status": "not serving", "reason": reason}, status=503)
        return web.json_response({"status": "ok", "broker_faults": TROUBLES.faults})


def _named(folder: Path, request: web.Request) -> Path:
    """Where a share of a file of the API, or one request's feedback, lies. Raises DataError."""
    field = "file" if "file" in request.query else "request"
    id_, tenant = request.query.get(field, ""), request.query.get("tenant", "")
    if not NAME.fullmatch(id_):
        raise DataError(f"must be 1 to 128 letters, digits and dashes, got {id_[:60]!r}", field=field)
    if field == "file":
        return folder / UPLOADS / f"{id_}.jsonl"
    # A tenant may be named anything, "..", for example; two tenants never share a folder.
    name = f"t-{quote(tenant, safe='')}"
    if len(name) > MAX_NAME:
        name = f"h-{hashlib.sha256(tenant.encode()).hexdigest()}"
    return folder / FEEDBACK / name / f"{id_}.jsonl"


def _store(path: Path | None, body: bytes, check: Callable[[str], int]) -> int:
    """Check every line, then write atomically, if there is a path: the same upload twice is one file."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start} is not UTF-8", field="body") from error
    count = check(text)
    if path is None:
        return count
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.parent.name == FEEDBACK and not path.exists() and len(os.listdir(path.parent)) >= MAX_FEEDBACK:
        raise DataError(f"{MAX_FEEDBACK} answers have feedback here, which is the limit", field="request")
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(body)
    partial.rename(path)
    return count


def _refuse(status: int, message: str, field: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": field or None, "code": "invalid_data"}
    return web.json_response({"error": error}, status=status)
