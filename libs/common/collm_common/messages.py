"""Every message that crosses Redis: one Struct a kind, one tagged union a receiver, MessagePack on the wire.

A stream entry is `kind`, `id` (readable in redis-cli) and `data` (this module's bytes). `decode` checks types,
ranges and the schema version on arrival; a wrong message raises MessageError that names the field.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from collm_common.errors import MessageError
from collm_common.types import AdapterRef, BatchSizes, Count, Name, Positive, Quality, ReplicaState, SamplingParams, Slo

SCHEMA = 1
Tokens = tuple[Annotated[int, Meta(ge=0)], ...]
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]


class Message(Struct, frozen=True, tag_field="kind", kw_only=True):
    """Base of all messages. Fields may be added with defaults; anything else raises SCHEMA."""

    schema: Annotated[int, Meta(ge=SCHEMA, le=SCHEMA)] = SCHEMA


# --- work: ingress -> dispatch loop -> replica


class Request(Message, frozen=True, kw_only=True, tag="request"):
    """One request on its way. `prefix` are tokens its client has already seen: the answer continues after them.

    `adapter` is "" for the base model; `version` pins it, None takes what is current at admission.
    `reference` tokens are scored (never sampled) under the same adapter version once the answer is complete.
    """

    id: RequestId
    attempt: Count = 0
    ingress: Name
    model: Name
    adapter: str = ""
    version: str | None = None
    prompt: Annotated[Tokens, Meta(min_length=1)]
    prefix: Tokens = ()
    reference: Tokens = ()
    sampling: SamplingParams
    slo: Slo
    arrival_s: float
    deadline_s: float


# --- replies: replica (or whoever gives a request up) -> ingress


class TokenLogprob(Struct, frozen=True):
    """Log-probability of the chosen token and of the most likely ones (token, logprob)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(Struct, frozen=True, tag="delta", tag_field="kind"):
    """New tokens of one request. `offset` counts the output tokens before these, prefix included.

    `finish` is None, or why it ended: stop, length, cancelled.
    """

    id: RequestId
    attempt: Count
    offset: Count
    tokens: Tokens
    text: str
    adapter: AdapterRef | None = None
    finish: str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


class Done(Struct, frozen=True, tag="done", tag_field="kind"):
    """The request is complete and its entry gone. Times are seconds at the replica."""

    id: RequestId
    attempt: Count
    output_tokens: Count
    queue_s: float
    prefill_s: float
    decode_s: float
    quality: Quality | None = None


class Failed(Struct, frozen=True, tag="failed", tag_field="kind"):
    """The request cannot be served: an HTTP status with the reason."""

    id: RequestId
    attempt: Count
    status: int
    code: str
    message: str


class Lost(Struct, frozen=True, tag="lost", tag_field="kind"):
    """The replica that had the request is gone: its ingress appends it again with what the client has seen."""

    id: RequestId
    attempt: Count


Reply = Delta | Done | Failed | Lost


class Replies(Message, frozen=True, kw_only=True, tag="replies"):
    """Everything one engine step says to one ingress."""

    items: tuple[Reply, ...]


# --- control: ingress, coordinator, launcher -> replica


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """The client left: stop within one step. Nothing is replied."""

    id: RequestId


class Configure(Message, frozen=True, kw_only=True, tag="configure"):
    """New batch sizes; `infer` caps the running batch, `train` is the micro-step of fine-tuning."""

    sizes: BatchSizes


class LoadAdapter(Message, frozen=True, kw_only=True, tag="load_adapter"):
    """Make a version of `name` current; 0 is the base model."""

    name: Name
    version: Count


class Hyperparams(Struct, frozen=True, forbid_unknown_fields=True):
    """What every client of a job shares. The LoRA scale is alpha / rank; a step has `accumulation` micro-steps."""

    rank: Annotated[int, Meta(ge=1, le=1024)] = 8
    alpha: Positive = 16.0
    learning_rate: Positive = 1e-3
    warmup_steps: Count = 3
    accumulation: Annotated[int, Meta(ge=1)] = 1
    max_tokens: Annotated[int, Meta(ge=8)] = 256
    snapshot_steps: Count = 0
    heldout_samples: Annotated[int, Meta(ge=1)] = 8


class TrainRound(Message, frozen=True, kw_only=True, tag="train_round"):
    """Train `steps` optimiser steps from `start` (version 0: fresh LoRA weights, equal on all clients by `seed`).

    `first_step` and `total_steps` place the round in the job's learning-rate schedule. Upload by `deadline_s`.
    """

    job: Name
    round: Annotated[int, Meta(ge=1)]
    adapter: Name
    start: Count
    sizes: BatchSizes
    steps: Annotated[int, Meta(ge=1)]
    first_step: Count
    total_steps: Annotated[int, Meta(ge=1)]
    hyper: Hyperparams
    seed: Count = 0
    deadline_s: float


class Aggregate(Message, frozen=True, kw_only=True, tag="aggregate"):
    """For the server replica: combine the clients' updates into `version`, a candidate until it is published."""

    job: Name
    round: Annotated[int, Meta(ge=1)]
    adapter: Name
    version: Annotated[int, Meta(ge=1)]
    parent: Count
    clients: tuple[Name, ...]
    strategy: str = "fedavg"
    hyper: Hyperparams
    deadline_s: float


class Evaluate(Message, frozen=True, kw_only=True, tag="evaluate"):
    """Measure held-out cross-entropy of a stored version (0: the base model) on this replica's own data."""

    job: Name
    round: Annotated[int, Meta(ge=1)]
    adapter: Name
    version: Count
    hyper: Hyperparams
    deadline_s: float


class PauseTraining(Message, frozen=True, kw_only=True, tag="pause_training"):
    """Stop between micro-steps until resumed."""


class ResumeTraining(Message, frozen=True, kw_only=True, tag="resume_training"):
    """Go on."""


class StopTraining(Message, frozen=True, kw_only=True, tag="stop_training"):
    """Leave the job: discard what the round has done so far."""

    job: Name


Control = (
    Cancel | Configure | LoadAdapter | TrainRound | Aggregate | Evaluate | PauseTraining | ResumeTraining | StopTraining
)


# --- telemetry: replica -> all


class Iteration(Struct, frozen=True):
    """Engine iterations of one (B, b) pair since the last report: how many and their mean duration."""

    sizes: BatchSizes
    count: Annotated[int, Meta(ge=1)]
    mean_s: Positive


class InferenceReport(Message, frozen=True, kw_only=True, tag="inference_report"):
    """What the inference process did since its last report.

    `utilisation` is in 0..1 (SM activity, or busy fraction on CPU); `mean_batch` averages running sequences over
    time; prefill_* and output_* let a reader divide; `versions` maps adapter name to its current version.
    """

    replica: Name
    state: ReplicaState
    time_s: float
    utilisation: Annotated[float, Meta(ge=0, le=1)]
    memory_bytes: Count
    queue: Count
    running: Count
    mean_batch: float
    limit: Count
    train_batch: Count
    iterations: tuple[Iteration, ...] = ()
    prefill_tokens: Count = 0
    prefill_s: float = 0.0
    output_tokens: Count = 0
    finished: Count = 0
    snapshots: Count = 0
    published: Count = 0
    versions: dict[str, str] = {}


class TrainReport(Message, frozen=True, kw_only=True, tag="train_report"):
    """One optimiser step: `step_s` is the mean duration of its micro-steps of `sizes`, loss the mean over its tokens.

    `noise_scale` is None until it can be estimated.
    """

    replica: Name
    job: Name
    round: Annotated[int, Meta(ge=1)]
    step: Annotated[int, Meta(ge=1)]
    time_s: float
    sizes: BatchSizes
    step_s: Positive
    samples: Annotated[int, Meta(ge=1)]
    loss: float
    noise_scale: float | None = None


Telemetry = InferenceReport | TrainReport


# --- events: whoever makes a change -> all


class StateChanged(Message, frozen=True, kw_only=True, tag="state_changed"):
    """A replica's transition, with its reason."""

    replica: Name
    before: ReplicaState
    after: ReplicaState
    reason: str
    time_s: float


class ReplicaChanged(Message, frozen=True, kw_only=True, tag="replica_changed"):
    """A replica came, went or restarted a process: `what` is up, down, restarting, finetune_restarting or left."""

    replica: Name
    what: str
    reason: str
    time_s: float


class JobChanged(Message, frozen=True, kw_only=True, tag="job_changed"):
    """A federated job's status, with the round it is in."""

    job: Name
    status: str
    round: Count
    reason: str
    time_s: float


class AdapterPublished(Message, frozen=True, kw_only=True, tag="adapter_published"):
    """A new current version; `before` and `after` are held-out cross-entropies."""

    name: Name
    version: Annotated[int, Meta(ge=1)]
    before: float | None = None
    after: float | None = None
    time_s: float


class UpdateUploaded(Message, frozen=True, kw_only=True, tag="update_uploaded"):
    """A client's update of a round is in Redis. `loss` is the mean over the round's steps, `loss_last` of the last."""

    job: Name
    round: Annotated[int, Meta(ge=1)]
    replica: Name
    samples: Annotated[int, Meta(ge=1)]
    loss: float
    loss_last: float
    noise_scale: float | None = None
    time_s: float


class Aggregated(Message, frozen=True, kw_only=True, tag="aggregated"):
    """The server stored a candidate version. `residual` is the relative Frobenius norm lost to the rank."""

    job: Name
    round: Annotated[int, Meta(ge=1)]
    adapter: Name
    version: Annotated[int, Meta(ge=1)]
    residual: float
    time_s: float


class Evaluated(Message, frozen=True, kw_only=True, tag="evaluated"):
    """Held-out cross-entropy of one version on one replica."""

    job: Name
    round: Annotated[int, Meta(ge=1)]
    replica: Name
    adapter: Name
    version: Count
    quality: Quality
    time_s: float


class TaskFailed(Message, frozen=True, kw_only=True, tag="task_failed"):
    """A replica could not do what the job asked of it (`task` is the control message's kind)."""

    job: Name
    round: Count
    replica: Name
    task: str
    reason: str
    time_s: float


Event = (
    StateChanged | ReplicaChanged | JobChanged | AdapterPublished | UpdateUploaded | Aggregated | Evaluated | TaskFailed
)

AnyMessage = Request | Replies | Control | Telemetry | Event

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The bytes that `decode` takes back."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Raises MessageError that names what is wrong and where."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise MessageError(f"bad message: {error}") from error


def kind(message: AnyMessage) -> str:
    """The readable kind of a message, as in the stream entry's field."""
    return str(type(message).__struct_config__.tag)
