"""The API's own description, made of the types that read its bodies and of those that its answers have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from collm_dispatcher.ingress import shapes
from collm_dispatcher.ingress.adapter_routes import LoadBody, UnloadBody
from collm_dispatcher.ingress.body import ChatBody, CompletionBody
from collm_dispatcher.ingress.feedback import FeedbackBody
from collm_dispatcher.ingress.files import MAX_LISTED
from collm_dispatcher.ingress.listing import MAX_LIMIT
from collm_dispatcher.ingress.tuning_routes import TuningBody

VERSION = "3.1.0"
PLACES = "#/components/schemas/{name}"
JSON, EVENTS, LINES, TEXT, FORM = (
    "application/json",
    "text/event-stream",
    "application/jsonl",
    "text/plain",
    "multipart/form-data",
)


class Operation(Struct, frozen=True):
    """`body` and `answer` map media types to types, or to schemas where there is no type; `lists` up to so many."""

    method: str
    path: str
    about: str
    answer: Mapping[str, Any]
    body: Mapping[str, Any] | None = None
    lists: int = 0


STRING: dict[str, Any] = {"type": "string"}
FILE_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {"purpose": {"const": "fine-tune"}, "file": {"type": "string", "format": "binary"}, "model": STRING},
}
JOBS = "/v1/fine_tuning/jobs"
OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation; with `stream`, server-sent events that end with [DONE]",
        {JSON: shapes.ChatCompletion, EVENTS: STRING},
        {JSON: ChatBody},
    ),
    Operation(
        "post",
        "/v1/completions",
        "Continue one or several prompts",
        {JSON: shapes.TextCompletion, EVENTS: STRING},
        {JSON: CompletionBody},
    ),
    Operation(
        "post",
        "/v1/load_lora_adapter",
        "Check an adapter in PEFT's form and serve it under a name",
        {JSON: shapes.Adapter},
        {JSON: LoadBody},
    ),
    Operation(
        "post",
        "/v1/unload_lora_adapter",
        "Take an adapter's name and versions away",
        {JSON: shapes.Deleted},
        {JSON: UnloadBody},
    ),
    Operation(
        "get", "/v1/models", "The served models and their adapters with their current versions", {JSON: shapes.Models}
    ),
    Operation("get", "/v1/models/{id}", "One of them", {JSON: shapes.Model}),
    Operation(
        "post", "/v1/files", "Deal training data out to the replicas of a model", {JSON: shapes.File}, {FORM: FILE_FORM}
    ),
    Operation("get", "/v1/files", "What was uploaded", {JSON: shapes.Files}, lists=MAX_LISTED),
    Operation("get", "/v1/files/{id}", "What is known of one upload", {JSON: shapes.File}),
    Operation(
        "delete", "/v1/files/{id}", "Take it away from every replica that has lines of it", {JSON: shapes.Deleted}
    ),
    Operation("get", "/v1/files/{id}/content", "Its lines, gathered from the replicas", {LINES: STRING}),
    Operation(
        "post",
        JOBS,
        "Ask for an adapter to be trained while replicas are idle",
        {JSON: shapes.Job},
        {JSON: TuningBody},
    ),
    Operation("get", JOBS, "What was asked for; metadata[name]=value filters", {JSON: shapes.Jobs}, lists=MAX_LIMIT),
    Operation("get", f"{JOBS}/{{id}}", "One of them", {JSON: shapes.Job}),
    Operation("post", f"{JOBS}/{{id}}/cancel", "End it", {JSON: shapes.Job}),
    Operation("post", f"{JOBS}/{{id}}/pause", "Let it rest: its replicas serve", {JSON: shapes.Job}),
    Operation(
        "post",
        f"{JOBS}/{{id}}/resume",
        "Go on from the last accepted version, once replicas are idle",
        {JSON: shapes.Job},
    ),
    Operation("get", f"{JOBS}/{{id}}/events", "What happened in it", {JSON: shapes.JobEvents}, lists=MAX_LIMIT),
    Operation(
        "get",
        f"{JOBS}/{{id}}/checkpoints",
        "The versions that it published",
        {JSON: shapes.Checkpoints},
        lists=MAX_LIMIT,
    ),
    Operation(
        "post",
        "/v1/feedback",
        "Rate an answer or give a better one: training data of the replica that served it",
        {JSON: shapes.Feedback},
        {JSON: FeedbackBody},
    ),
    Operation(
        "delete",
        "/v1/feedback/{id}",
        "Take the feedback on one answer back, wherever it is stored",
        {JSON: shapes.Deleted},
    ),
    Operation(
        "post",
        "/v1/replicas/{id}/data",
        "Hand training data, one JSON object a line, to one replica",
        {JSON: shapes.Taken},
        {LINES: STRING, TEXT: STRING},
    ),
    Operation("get", "/health", "Whether the process lives", {JSON: shapes.Status}),
    Operation("get", "/ready", "Whether requests can be answered now", {JSON: shapes.Status}),
    Operation("get", "/metrics", "Measurements in Prometheus' text format", {TEXT: STRING}),
    Operation("get", "/openapi.json", "This document", {JSON: {"type": "object"}}),
)


def document() -> dict[str, Any]:
    """OpenAPI 3.1: every route, what it reads and answers, and what all errors look like."""
    media = [each for operation in OPERATIONS for each in (operation.body, operation.answer) if each is not None]
    types = [kind for each in media for kind in each.values() if isinstance(kind, type)]
    _, components = msgspec.json.schema_components([*types, shapes.Error], ref_template=PLACES)
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": VERSION,
        "info": {"title": "CoLLM", "version": "1", "description": "Chat, completions and adapters of one cell"},
        "paths": paths,
        "components": {"schemas": components},
    }


def _described(operation: Operation) -> dict[str, Any]:
    answers = {
        "200": {"description": "Done", "content": _content(operation.answer)},
        "default": {"description": "Refused", "content": _content({JSON: shapes.Error})},
    }
    found: dict[str, Any] = {"summary": operation.about, "responses": answers}
    if parameters := _parameters(operation):
        found["parameters"] = parameters
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": _content(operation.body)}
    return found


def _content(media: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: {"schema": {"$ref": PLACES.format(name=kind.__name__)} if isinstance(kind, type) else kind}
        for name, kind in media.items()
    }


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if "{id}" in operation.path:
        found.append({"name": "id", "in": "path", "required": True, "schema": STRING})
    if operation.lists:
        limit = {"type": "integer", "minimum": 1, "maximum": operation.lists}
        order = {"enum": ["asc", "desc"]}
        found += [
            {"name": name, "in": "query", "schema": schema}
            for name, schema in (("limit", limit), ("after", STRING), ("order", order))
        ]
    return found
