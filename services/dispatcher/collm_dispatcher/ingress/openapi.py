"""The API's own description, made of the types that read its bodies."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from collm_dispatcher.ingress.adapter_routes import LoadBody, UnloadBody
from collm_dispatcher.ingress.body import ChatBody, CompletionBody
from collm_dispatcher.ingress.feedback import FeedbackBody
from collm_dispatcher.ingress.tuning_routes import TuningBody

VERSION = "3.1.0"
PLACES = "#/components/schemas/{name}"


class ErrorDetail(Struct):
    """What was refused: `param` names the field, `code` is for programs."""

    message: str
    type: str
    code: str
    param: str | None


class Error(Struct):
    """Every answer of 400 or more."""

    error: ErrorDetail


BODIES: dict[str, type[Struct]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/load_lora_adapter": LoadBody,
    "/v1/unload_lora_adapter": UnloadBody,
    "/v1/fine_tuning/jobs": TuningBody,
    "/v1/feedback": FeedbackBody,
}
ABOUT = {
    "/v1/chat/completions": "Answer a conversation; with `stream`, server-sent events that end with [DONE]",
    "/v1/completions": "Continue one or several prompts",
    "/v1/load_lora_adapter": "Check an adapter in PEFT's form and serve it under a name",
    "/v1/unload_lora_adapter": "Take an adapter's name and versions away",
    "/v1/models": "The served models and their adapters with their current versions",
    "/v1/models/{id}": "One of them",
    "/v1/files": "Deal training data out to the replicas of a model, or list what was",
    "/v1/files/{id}": "What is known of one upload, or take it away from every replica that has lines of it",
    "/v1/files/{id}/content": "Its lines, gathered from the replicas",
    "/v1/fine_tuning/jobs": "Ask for an adapter to be trained while replicas are idle, or list such jobs",
    "/v1/fine_tuning/jobs/{id}": "One of them",
    "/v1/fine_tuning/jobs/{id}/cancel": "End it",
    "/v1/fine_tuning/jobs/{id}/pause": "Let it rest: its replicas serve",
    "/v1/fine_tuning/jobs/{id}/resume": "Go on from the last accepted version, once replicas are idle",
    "/v1/fine_tuning/jobs/{id}/events": "What happened in it, newest first",
    "/v1/fine_tuning/jobs/{id}/checkpoints": "The versions that it published",
    "/v1/feedback": "Rate an answer or give a better one: training data of the replica that served it",
    "/v1/feedback/{id}": "Take the feedback on one answer back, wherever it is stored",
    "/v1/replicas/{id}/data": "Hand training data, one JSON object a line, to one replica",
    "/health": "Whether the process lives",
    "/ready": "Whether requests can be answered now",
    "/metrics": "Measurements in Prometheus' text format",
    "/openapi.json": "This document",
}
FILES = "/v1/files"
BARE = frozenset(f"/v1/fine_tuning/jobs/{{id}}/{verb}" for verb in ("cancel", "pause", "resume"))
POSTS = frozenset({*BODIES, "/v1/replicas/{id}/data", *BARE, FILES})
DELETES = frozenset({"/v1/feedback/{id}", "/v1/files/{id}"})
LISTS = frozenset({FILES, "/v1/fine_tuning/jobs"})
UNREAD = frozenset({"/v1/feedback/{id}"})
FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"const": "fine-tune"},
        "file": {"type": "string", "format": "binary"},
        "model": {"type": "string"},
    },
}


def document() -> dict[str, Any]:
    """OpenAPI 3.1: every route, its body, and what all errors look like."""
    types = [*BODIES.values(), Error]
    _, components = msgspec.json.schema_components(types, ref_template=PLACES)
    return {
        "openapi": VERSION,
        "info": {"title": "CoLLM", "version": "1", "description": "Chat, completions and adapters of one cell"},
        "paths": {path: _operations(path, about) for path, about in ABOUT.items()},
        "components": {"schemas": components},
    }


def _operations(path: str, about: str) -> dict[str, Any]:
    found = {"post": _operation(path, about, posts=True)} if path in POSTS else {}
    if path in DELETES:
        found["delete"] = _operation(path, about, posts=False)
    if path in LISTS or not (path in POSTS or path in UNREAD):
        found["get"] = _operation(path, about, posts=False)
    return found


def _operation(path: str, about: str, *, posts: bool) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": PLACES.format(name="Error")}}}
    operation: dict[str, Any] = {
        "summary": about,
        "responses": {"200": {"description": "Done"}, "default": {"description": "Refused", "content": error}},
    }
    if "{id}" in path:
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if not posts or path in BARE:
        return operation
    if path in BODIES:
        schema = {"$ref": PLACES.format(name=BODIES[path].__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    elif path == FILES:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}
    else:
        operation["requestBody"] = {"required": True, "content": {"application/jsonl": {"schema": {"type": "string"}}}}
    return operation
