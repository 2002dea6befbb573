"""Measurements: replica -> all."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from collm_common.messages.base import Message
from collm_common.messages.replies import Expected
from collm_common.types import (
    AdapterRef,
    AtLeastOne,
    BatchSizes,
    Count,
    Name,
    Positive,
    Quality,
    ReplicaState,
    Share,
    Slo,
)


class Iteration(Struct, frozen=True):
    """Engine iterations of one (B, b, SM share) since the last report: how many and their mean duration."""

    sizes: BatchSizes
    count: Annotated[int, Meta(ge=1)]
    mean_s: Positive


class Served(Struct, frozen=True):
    """Requests of one objective that came in since the last report, and how long they had waited since they arrived."""

    slo: Slo
    requests: AtLeastOne
    waited_s: Annotated[float, Meta(ge=0)] = 0.0


class Answered(Struct, frozen=True):
    """A whole answer of one objective (`slo`): its length, its times at the replica, and what was expected of it.

    `cached_tokens` of its prompt were not computed, because an earlier request began with the same ones.
    """

    slo: str
    tokens: Count
    first_s: float
    token_s: float | None = None
    expected: Expected | None = None
    cached_tokens: Count = 0


class Scored(Struct, frozen=True):
    """References that were scored under one adapter version since the last report."""

    adapter: AdapterRef
    quality: Quality


class InferenceReport(Message, frozen=True, kw_only=True, tag="inference_report"):
    """What the inference process did since its last report.

    `utilisation` is in 0..1 (SM activity, or busy fraction on CPU); `mean_batch` averages running sequences over
    time; prefill_* (of tokens that were computed) and output_* let a reader divide; `kv_usage` is the share of KV
    blocks that requests hold now; `versions` maps adapter name to its current version.
    `preemptions` counts, since the process began, sequences whose KV blocks others needed and that were computed again.
    `served` has what came in, by objective, `answered` the first answers that ended, `scored` how well adapter versions
    did on references; `sm_shares` the shares that its trainer can be given (none: no choice); `mps` whether its
    processes use the GPU at the same time.
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
    kv_usage: Annotated[float, Meta(ge=0, le=1)] = 0.0
    preemptions: Count = 0
    output_tokens: Count = 0
    finished: Count = 0
    snapshots: Count = 0
    published: Count = 0
    versions: dict[str, str] = {}
    served: tuple[Served, ...] = ()
    sm_shares: tuple[Share, ...] = ()
    mps: bool = False
    answered: tuple[Answered, ...] = ()
    scored: tuple[Scored, ...] = ()


class TrainReport(Message, frozen=True, kw_only=True, tag="train_report"):
    """One optimiser step: `step_s` is the mean duration of its micro-steps of `sizes`, loss the mean over its tokens.

    `sizes.infer` is the limit b that was configured; how many sequences ran beside it an InferenceReport tells.
    `noise_scale` is None until it can be estimated. `memory_bytes` is the peak beyond the shared weights, of at most
    `memory_limit_bytes`; 0 where nobody measures.
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
    memory_bytes: Count = 0
    memory_limit_bytes: Count = 0


Telemetry = InferenceReport | TrainReport
