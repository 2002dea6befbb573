"""Changes: whoever makes one -> all."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from collm_common.messages.base import Message
from collm_common.types import Count, Name, Quality, ReplicaState


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


class AdapterRolledBack(Message, frozen=True, kw_only=True, tag="adapter_rolled_back"):
    """An operator made an older version current; `before` was it until now."""

    name: Name
    version: Count
    before: Count
    reason: str
    time_s: float


class UpdateUploaded(Message, frozen=True, kw_only=True, tag="update_uploaded"):
    """A client's update of a round is in Redis. `loss` is the mean over the round's steps, `loss_last` of the last.

    `epsilon` is what all noised uploads of the client's data have spent so far; None for one without noise.
    """

    job: Name
    round: Annotated[int, Meta(ge=1)]
    replica: Name
    samples: Annotated[int, Meta(ge=1)]
    loss: float
    loss_last: float
    noise_scale: float | None = None
    epsilon: float | None = None
    time_s: float


class Aggregated(Message, frozen=True, kw_only=True, tag="aggregated"):
    """The server stored a candidate version. `residual` is the relative Frobenius norm lost to the rank.

    `refused` maps clients whose update could not be used to the reason.
    """

    job: Name
    round: Annotated[int, Meta(ge=1)]
    adapter: Name
    version: Annotated[int, Meta(ge=1)]
    residual: float
    refused: dict[Name, str] = {}
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
    StateChanged
    | ReplicaChanged
    | JobChanged
    | AdapterPublished
    | AdapterRolledBack
    | UpdateUploaded
    | Aggregated
    | Evaluated
    | TaskFailed
)
