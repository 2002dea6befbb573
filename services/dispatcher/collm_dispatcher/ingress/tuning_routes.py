"""Fine-tuning jobs in OpenAI's shape."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from collm_common.errors import Damaged, InvalidRequest
from collm_common.keys import Keys
from collm_common.lineage import Turn
from collm_common.messages import Event, TaskFailed, UpdateUploaded
from collm_dispatcher.ingress.body import parse
from collm_dispatcher.ingress.directory import Directory
from collm_dispatcher.ingress.exchange import read_body
from collm_dispatcher.ingress.files import Files
from collm_dispatcher.ingress.gate import Gate, scope
from collm_dispatcher.ingress.listing import MAX_LIMIT, Page, listed
from collm_dispatcher.ingress.tuning_store import Tuning, TuningStore, UnknownJob, new_id
from collm_dispatcher.ingress.unsupported import Neutral, refuse

MAX_BODY = 65_536
AUTO = {"batch_size": "auto", "learning_rate_multiplier": "auto", "n_epochs": "auto"}
NOT_SERVED: Neutral = {"validation_file": (), "seed": (), "integrations": ([],)}
JOB = "/v1/fine_tuning/jobs/{id}"


class Hyperparameters(Struct, forbid_unknown_fields=True):
    """All are chosen here: batch sizes by the coordinator, the rest by the operator's rules."""

    batch_size: Literal["auto"] | None = None
    learning_rate_multiplier: Literal["auto"] | None = None
    n_epochs: Literal["auto"] | None = None


class Supervised(Struct):
    """The only method."""

    hyperparameters: Hyperparameters | None = None


class Method(Struct):
    """How to train."""

    type: Literal["supervised"]
    supervised: Supervised | None = None


class TuningBody(Struct):
    """POST /v1/fine_tuning/jobs: train the adapter `model`-`suffix`, or go on with the adapter `model`."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    training_file: Annotated[str, Meta(min_length=1, max_length=128)]
    suffix: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,40}$(?!\n)")] | None = None
    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
        | None
    ) = None
    method: Method | None = None
    hyperparameters: Hyperparameters | None = None


class TuningRoutes:
    """Create, list, get, cancel, pause and resume; events and checkpoints."""

    def __init__(
        self, redis: Any, keys: Keys, store: TuningStore, directory: Directory, files: Files, gate: Gate
    ) -> None:
        self._redis, self._keys, self._store, self._directory, self._files = redis, keys, store, directory, files
        self._gate = gate

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Its routes."""
        router.add_post("/v1/fine_tuning/jobs", self._create)
        router.add_get("/v1/fine_tuning/jobs", self._list)
        router.add_get(JOB, self._get)
        router.add_post(f"{JOB}/cancel", self._cancel)
        router.add_post(f"{JOB}/pause", self._pause)
        router.add_post(f"{JOB}/resume", self._resume)
        router.add_get(f"{JOB}/events", self._events)
        router.add_get(f"{JOB}/checkpoints", self._checkpoints)

    async def _create(self, request: web.Request) -> web.StreamResponse:
        data = await read_body(request, MAX_BODY)
        body = parse(TuningBody, data)
        refuse(msgspec.json.decode(data), NOT_SERVED)
        target = self._directory.find(body.model, await self._gate.hidden(request))
        if target.version is not None:
            raise InvalidRequest("model: training goes on with the current version; name none", param="model")
        if target.adapter and body.suffix is not None:
            raise InvalidRequest("suffix: the adapter has a name already", param="suffix")
        file = await self._files.find(body.training_file, scope(request), "training_file")
        if file["model"] != target.model:
            raise InvalidRequest(f"training_file: is data for {file['model']}", param="training_file")
        id_ = new_id()
        name = target.adapter or (f"{target.model}-{body.suffix}" if body.suffix is not None else id_)
        await self._gate.claim(request, name)
        metadata = msgspec.json.encode(body.metadata or {}).decode()
        now, whose = int(time.time()), scope(request)
        made = await self._store.create(
            body.model, target.model, name, body.training_file, metadata, now, id_=id_, tenant=whose
        )
        return web.json_response(_shape(made))

    async def _list(self, request: web.Request) -> web.StreamResponse:
        page, wanted = Page.of(request.query), _metadata(request.query)
        found: list[dict[str, Any]] = []
        after, more = page.after, True
        while more and len(found) <= page.limit:
            ids, more = await listed(
                self._redis, self._keys.tunings(scope(request)), Page(MAX_LIMIT, after, page.oldest)
            )
            for id_ in ids:
                try:
                    shown = _shape(await self._store.find(id_, scope(request)))
                except (UnknownJob, Damaged):
                    continue
                if wanted.items() <= shown["metadata"].items():
                    found.append(shown)
                if len(found) > page.limit:
                    break
            after = ids[-1] if ids else after
        return web.json_response(page.envelope(found[: page.limit], len(found) > page.limit))

    async def _get(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(_shape(await self._find(request)))

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(_shape(await self._store.cancel(await self._find(request))))

    async def _pause(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(_shape(await self._store.pause(await self._find(request))))

    async def _resume(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(_shape(await self._store.resume(await self._find(request))))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        known, page = await self._find(request), Page.of(request.query)
        told, more = await self._store.events(known, page)
        return web.json_response(page.envelope([_event(id_, event) for id_, event in told], more))

    async def _checkpoints(self, request: web.Request) -> web.StreamResponse:
        known, page = await self._find(request), Page.of(request.query, default=10)
        made = [_checkpoint(known, turn) for turn in await self._store.versions(known)][:: -1 if page.oldest else 1]
        start = page.behind([each["id"] for each in made])
        end = start + page.limit
        return web.json_response(page.envelope(made[start:end], len(made) > end))

    async def _find(self, request: web.Request) -> Tuning:
        return await self._store.find(request.match_info["id"], scope(request))


def _shape(job: Tuning) -> dict[str, Any]:
    error = {"code": "job_failed", "message": job.reason, "param": None} if job.status == "failed" else None
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "created_at": job.created_at,
        "finished_at": job.finished_at,
        "status": job.status,
        "model": job.asked,
        "fine_tuned_model": f"{job.adapter}@v{job.version}" if job.status == "succeeded" else None,
        "training_file": job.training_file,
        "validation_file": None,
        "result_files": [],
        "trained_tokens": None,
        "organization_id": "",
        "seed": 0,
        "hyperparameters": AUTO,
        "method": {"type": "supervised", "supervised": {"hyperparameters": AUTO}},
        "error": error,
        "metadata": msgspec.json.decode(job.metadata),
        "collm": {"adapter": job.adapter, "version": job.version},
    }


def _event(id_: str, event: Event) -> dict[str, Any]:
    about = msgspec.to_builtins(event)
    data = {name: value for name, value in about.items() if name not in ("kind", "schema", "job", "time_s")}
    message = about.get("reason") or " ".join(f"{name} {value}" for name, value in data.items() if value is not None)
    return {
        "id": id_,
        "object": "fine_tuning.job.event",
        "created_at": int(about["time_s"]),
        "level": "warn" if isinstance(event, TaskFailed) else "info",
        "message": f"{about['kind']}: {message}",
        "type": "metrics" if isinstance(event, UpdateUploaded) else "message",
        "data": data,
    }


def _checkpoint(job: Tuning, turn: Turn) -> dict[str, Any]:
    return {
        "id": f"ftckpt-{job.adapter}-v{turn.version}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(turn.time_s),
        "fine_tuned_model_checkpoint": f"{job.adapter}@v{turn.version}",
        "fine_tuning_job_id": job.id,
        "metrics": {"step": turn.version, "full_valid_loss": turn.after},
        "step_number": turn.version,
    }


def _metadata(query: Mapping[str, str]) -> dict[str, str]:
    """`metadata[name]=value`, each of which a job must have."""
    return {name[9:-1]: value for name, value in query.items() if name.startswith("metadata[") and name.endswith("]")}
