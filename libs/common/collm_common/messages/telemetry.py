"""Measurements: replica -> all."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from collm_common.messages.base import Message
from collm_common.types import BatchSizes, Count, Name, Positive, ReplicaState


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

    `sizes.infer` is the limit b that was configured; how many sequences ran beside it an InferenceReport tells.
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
