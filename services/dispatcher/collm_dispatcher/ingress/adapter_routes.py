"""Adapters loaded and unloaded while the cell runs, in vLLM's spelling."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from aiohttp import web
from msgspec import Meta, Struct

from collm_common.clock import Clock
from collm_common.errors import AdapterError, InvalidRequest, RequestError, Unavailable, UnknownModel
from collm_common.types import AdapterRef, Name
from collm_dispatcher.cell import Cell
from collm_dispatcher.ingress import peft_folder
from collm_dispatcher.ingress.adapter_store import AdapterStore
from collm_dispatcher.ingress.answer import Answers
from collm_dispatcher.ingress.body import parse
from collm_dispatcher.ingress.directory import VERSION
from collm_dispatcher.ingress.exchange import read_body
from collm_dispatcher.ingress.gate import Gate, scope
from collm_dispatcher.ingress.peft_folder import OutsideAdapter

log = logging.getLogger(__name__)
MAX_BODY = 16_384


class LoadBody(Struct):
    """POST /v1/load_lora_adapter. `lora_path` is a folder under the one that the settings name."""

    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    load_inplace: bool = False
    base_model_name: str | None = None


class UnloadBody(Struct):
    """POST /v1/unload_lora_adapter."""

    lora_name: Name


class Off(RequestError):
    """Who may reach the API may not change what it serves."""

    status = 403
    type = "permission_error"
    code = "runtime_adapters_off"


class AdapterRoutes:
    """An adapter is known to clients only after a replica has answered with it."""

    def __init__(
        self,
        folder: str,
        max_bytes: int,
        models: Mapping[str, str],
        cell: Cell,
        store: AdapterStore,
        answers: Answers,
        gate: Gate,
        clock: Clock,
    ) -> None:
        """`folder` "" refuses all changes; a tenant with a key has a folder of its name in it."""
        self._folder, self._max_bytes, self._models = folder, max_bytes, models
        self._cell, self._store, self._answers, self._gate, self._clock = cell, store, answers, gate, clock

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Its routes."""
        router.add_post("/v1/load_lora_adapter", self._load)
        router.add_post("/v1/unload_lora_adapter", self._unload)

    async def _load(self, request: web.Request) -> web.StreamResponse:
        body = parse(LoadBody, await self._body(request))
        self._check_name(body.lora_name)
        await self._gate.claim(request, body.lora_name)
        async with self._store.alone(body.lora_name):
            if not body.load_inplace and await self._store.known(body.lora_name):
                raise InvalidRequest(
                    f"lora_name: {body.lora_name!r} is loaded already; load_inplace makes a new version of it",
                    param="lora_name",
                )
            ref = await self._take(body, scope(request))
        await self._cell.refresh()
        log.info("adapter %s was loaded from %s", ref, body.lora_path)
        return web.json_response({"id": ref.name, "object": "model", "root": str(ref), "version": int(ref.version)})

    async def _unload(self, request: web.Request) -> web.StreamResponse:
        body = parse(UnloadBody, await self._body(request))
        if not await self._gate.owns(request, body.lora_name):
            raise UnknownModel(f"no adapter {body.lora_name!r} of this tenant", param="lora_name")
        async with self._store.alone(body.lora_name):
            if not await self._store.known(body.lora_name):
                raise UnknownModel(f"no adapter {body.lora_name!r}", param="lora_name")
            adapter = self._cell.adapters.get(body.lora_name)
            await self._store.remove(body.lora_name, self._replicas(adapter.model if adapter else None))
        await self._cell.refresh()
        log.info("adapter %s was unloaded", body.lora_name)
        return web.json_response({"id": body.lora_name, "object": "model", "deleted": True})

    async def _body(self, request: web.Request) -> bytes:
        if not self._folder:
            raise Off("adapters are not loaded at run time here; COLLM_DISPATCHER_ADAPTER_DIR allows it")
        return await read_body(request, MAX_BODY)

    async def _take(self, body: LoadBody, whose: str) -> AdapterRef:
        """Check, store, try, publish; nothing is left of what fails on the way."""
        try:
            adapter = await asyncio.to_thread(peft_folder.read, self._path(body.lora_path, whose), self._max_bytes)
        except AdapterError as error:
            raise InvalidRequest(f"lora_path: {error}", param="lora_path", code="adapter_unfit") from error
        model = self._base(body, adapter)
        ref = await self._store.put(body.lora_name, self._digest(model), adapter)
        try:
            await self._answers.try_out(model, ref)
        except BaseException as error:
            await self._store.drop(ref)
            if isinstance(error, RequestError) and error.status < 429:
                raise InvalidRequest(f"lora_path: {error}", param="lora_path", code="adapter_unfit") from error
            raise
        await self._store.publish(ref, model, self._replicas(model), self._clock.now())
        return ref

    def _check_name(self, name: str) -> None:
        if name in self._models or VERSION.match(name):
            raise InvalidRequest(f"lora_name: {name!r} is a model or names a version", param="lora_name")

    def _path(self, text: str, whose: str) -> Path:
        root = (Path(self._folder) / whose).resolve()
        try:
            path = (root / text).resolve()
        except (OSError, RuntimeError, ValueError) as error:
            raise InvalidRequest(f"lora_path: is no path: {error}", param="lora_path") from error
        if not path.is_relative_to(root):
            raise InvalidRequest("lora_path: lies outside of the folder for adapters", param="lora_path")
        return path

    def _base(self, body: LoadBody, adapter: OutsideAdapter) -> str:
        """The served model that the adapter belongs to: the one asked for, the one it names, or the only one."""
        asked = body.base_model_name
        if asked is not None and asked not in self._models:
            raise UnknownModel(f"no model {asked!r}", param="base_model_name")
        names = {_tail(adapter.trained_on)} - {""}
        named = [name for name, source in self._models.items() if names & {_tail(name), _tail(source)}]
        if asked is not None and named and asked not in named:
            raise InvalidRequest(f"lora_path: the adapter was trained on {named[0]}, not {asked}", param="lora_path")
        candidates = [asked] if asked is not None else named or list(self._models)
        if len(candidates) > 1:
            raise InvalidRequest(
                f"base_model_name: say which of {', '.join(sorted(candidates))} it adapts", param="base_model_name"
            )
        return candidates[0]

    def _digest(self, model: str) -> str:
        """Of the weights that all its replicas serve."""
        digests = {member.info.base_digest for member in self._cell.of(model) if member.usable}
        if len(digests) != 1:
            raise Unavailable(f"{len(digests)} kinds of weights are served as {model}, must be one", code="no_replica")
        return digests.pop()

    def _replicas(self, model: str | None) -> list[str]:
        return [id_ for id_, member in self._cell.members.items() if model in (None, member.info.model)]


def _tail(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]
