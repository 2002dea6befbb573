"""Commands: ingress, coordinator, launcher, dispatcher, operator -> replica."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from collm_common.messages.base import Message, RequestId
from collm_common.types import AtLeastOne, BatchSizes, Count, Fraction, Name, Positive, Rank, Strategy


class Cancel(Message, frozen=True, kw_only=True, tag="cancel"):
    """The client left: stop within one step. Nothing is replied."""

    id: RequestId


class Configure(Message, frozen=True, kw_only=True, tag="configure"):
    """New batch sizes; `infer` caps the running batch, `train` is the micro-step of fine-tuning.

    Another `sm_share` takes effect when the fine-tuning process is made anew: a CUDA context keeps what it began with.
    """

    sizes: BatchSizes


class LoadAdapter(Message, frozen=True, kw_only=True, tag="load_adapter"):
    """Make a version of `name` current; 0 is the base model."""

    name: Name
    version: Count


class UnloadAdapter(Message, frozen=True, kw_only=True, tag="unload_adapter"):
    """Nobody new gets `name`; requests that are here keep it to their end."""

    name: Name


class Hyperparams(Struct, frozen=True, forbid_unknown_fields=True):
    """What every client of a job shares. The LoRA scale is alpha / rank; a step has `accumulation` micro-steps.

    `learning_rate` is for optimiser steps of `base_samples` (M0); it follows the root of what a step really has, up to
    twice as much. The default was found with 135 million parameters; a model of billions wants about a tenth of it.
    `proximal` is mu of FedProx: the loss gains mu / 2 |x - start|^2. Above 0, `clip_norm` bounds the change that a
    client uploads, and `noise_multiplier` times it is the deviation of noise on it; epsilon is told at `delta`.
    """

    rank: Rank = 8
    alpha: Positive = 16.0
    learning_rate: Positive = 4e-3
    base_samples: Annotated[int, Meta(ge=1)] = 4
    warmup_steps: Count = 3
    accumulation: Annotated[int, Meta(ge=1)] = 1
    max_tokens: Annotated[int, Meta(ge=8)] = 256
    snapshot_steps: Count = 0
    heldout_samples: Annotated[int, Meta(ge=1)] = 8
    proximal: Annotated[float, Meta(ge=0)] = 0.0
    clip_norm: Annotated[float, Meta(ge=0)] = 0.0
    noise_multiplier: Annotated[float, Meta(ge=0)] = 0.0
    delta: Annotated[float, Meta(gt=0, lt=1)] = 1e-5

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.noise_multiplier > 0 and self.clip_norm == 0:
            raise ValueError("noise_multiplier needs clip_norm above 0")

    def at_rank(self, rank: int) -> Hyperparams:
        """The same at another rank: alpha follows, so that the scale stays."""
        return msgspec.structs.replace(self, rank=rank, alpha=self.alpha * rank / self.rank)


class ServerRates(Struct, frozen=True, forbid_unknown_fields=True):
    """How fast fedavgm (the first two) and fedadam (all) move. Where nothing is said: 1 and 0.3, and 0.01 and 0.9."""

    learning_rate: Positive | None = None
    momentum: Fraction | None = None
    beta2: Fraction = 0.99
    tau: Positive = 1e-3


class TrainRound(Message, frozen=True, kw_only=True, tag="train_round"):
    """Train `steps` optimiser steps from `start` (version 0: fresh LoRA weights, equal on all clients by `seed`).

    `first_step` and `total_steps` place the round in the job's learning-rate schedule. From `upload_by_s` on what is
    done is uploaded, however little; nothing is taken after `deadline_s`.
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
    upload_by_s: float = float("inf")
    deadline_s: float


class Aggregate(Message, frozen=True, kw_only=True, tag="aggregate"):
    """For the server replica: combine the clients' updates of `parent` into `version`, a candidate until published.

    `steps` is what each client was asked for; the job's `seed` makes the fresh weights that version 0 stands for.
    """

    job: Name
    round: Annotated[int, Meta(ge=1)]
    adapter: Name
    version: Annotated[int, Meta(ge=1)]
    parent: Count
    clients: tuple[Name, ...]
    steps: AtLeastOne | None = None
    strategy: Strategy = "fedavg"
    rates: ServerRates = ServerRates()
    seed: Count = 0
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


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """Take nothing new, answer what is here, and end."""

    reason: str


Control = (
    Cancel
    | Configure
    | LoadAdapter
    | UnloadAdapter
    | TrainRound
    | Aggregate
    | Evaluate
    | PauseTraining
    | ResumeTraining
    | StopTraining
    | Leave
)
