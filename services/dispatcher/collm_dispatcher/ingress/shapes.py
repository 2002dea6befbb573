"""What the routes answer, as types: for the API's description, and to check answers against."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class ErrorDetail(Struct):
    """What was refused: `param` names the field, `code` is for programs."""

    message: str
    type: str
    code: str
    param: str | None


class Error(Struct):
    """Every answer of 400 or more."""

    error: ErrorDetail


class Usage(Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Message(Struct):
    """What the model said."""

    role: Literal["assistant"]
    content: str


class ChatChoice(Struct):
    """One answer to a conversation."""

    index: int
    message: Message
    finish_reason: str
    logprobs: dict[str, Any] | None


class ChatCompletion(Struct):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    collm: dict[str, Any]


class TextChoice(Struct):
    """One continuation."""

    index: int
    text: str
    finish_reason: str
    logprobs: dict[str, Any] | None


class TextCompletion(Struct):
    """Continuations."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    collm: dict[str, Any]


class Model(Struct):
    """A served model, or an adapter of one."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None


class Models(Struct):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class Adapter(Struct):
    """A version that is served from now on."""

    id: str
    object: Literal["model"]
    root: str
    version: int


class Deleted(Struct):
    """Something is gone."""

    id: str
    object: str
    deleted: bool


class File(Struct):
    """What is known of an upload."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["fine-tune"]
    status: Literal["processed"]


class Files(Struct):
    """A page of uploads."""

    object: Literal["list"]
    data: list[File]
    has_more: bool


class Job(Struct):
    """A fine-tuning job."""

    id: str
    object: Literal["fine_tuning.job"]
    created_at: int
    finished_at: int | None
    status: Literal["queued", "running", "paused", "succeeded", "failed", "cancelled"]
    model: str
    fine_tuned_model: str | None
    training_file: str
    error: dict[str, Any] | None
    metadata: dict[str, str]


class Jobs(Struct):
    """A page of jobs."""

    object: Literal["list"]
    data: list[Job]
    has_more: bool


class JobEvent(Struct):
    """Something that happened in a job."""

    id: str
    object: Literal["fine_tuning.job.event"]
    created_at: int
    level: Literal["info", "warn"]
    message: str
    type: Literal["message", "metrics"]
    data: dict[str, Any]


class JobEvents(Struct):
    """A page of events."""

    object: Literal["list"]
    data: list[JobEvent]
    has_more: bool


class Checkpoint(Struct):
    """A version that a job published."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"]
    created_at: int
    fine_tuned_model_checkpoint: str
    fine_tuning_job_id: str
    metrics: dict[str, float | None]
    step_number: int


class Checkpoints(Struct):
    """A page of versions."""

    object: Literal["list"]
    data: list[Checkpoint]
    has_more: bool


class Feedback(Struct):
    """Whether a sample was made of it."""

    id: str
    object: Literal["feedback"]
    stored: bool


class Taken(Struct):
    """How many samples were stored."""

    samples: int


class Status(Struct):
    """One word."""

    status: str
