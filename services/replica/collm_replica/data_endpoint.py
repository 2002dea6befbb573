"""The replica's internal HTTP endpoint: training data comes here from the ingress, never through the broker."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from collm_common.errors import DataError, ModelError
from collm_common.trouble import TROUBLES

UPLOADS = "uploads"


class DataEndpoint:
    """POST /data (JSON lines; ?check only checks them), GET /digest, GET /health.

    Files land in `folder`/uploads, named by content.
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
        self._folder, self._max_bytes, self._check, self._digest = folder / UPLOADS, max_bytes, check, digest
        self._trouble = trouble
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; returns the port (a free one for 0)."""
        app = web.Application(client_max_size=self._max_bytes)
        app.router.add_post("/data", self._upload)
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
            folder = None if "check" in request.query else self._folder
            count = await asyncio.to_thread(_store, folder, body, self._check)
        except DataError as error:
            return _refuse(400, str(error), error.field)
        return web.json_response({"samples": count})

    async def _get_digest(self, _: web.Request) -> web.Response:
        try:
            return web.json_response({"digest": await self._digest()})
        except (ModelError, TimeoutError) as error:
            return _refuse(503, f"no digest: {error}", "")

    async def _health(self, _: web.Request) -> web.Response:
        if reason := self._trouble():
            return web.json_response({"status": "not serving", "reason": reason}, status=503)
        return web.json_response({"status": "ok", "broker_faults": TROUBLES.faults})


def _store(folder: Path | None, body: bytes, check: Callable[[str], int]) -> int:
    """Check every line, then write atomically, if there is a folder. The same upload twice is one file."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"byte {error.start} is not UTF-8", field="body") from error
    count = check(text)
    if folder is None:
        return count
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(body).hexdigest()[:32]}.jsonl"
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(body)
    partial.rename(path)
    return count


def _refuse(status: int, message: str, field: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": field or None, "code": "invalid_data"}
    return web.json_response({"error": error}, status=status)
