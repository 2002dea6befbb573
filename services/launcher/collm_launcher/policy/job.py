"""The durable state of one federated job, and what it asks its service to do."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, field

from collm_common.messages import Control, Event, Hyperparams, ServerRates
from collm_common.types import AtLeastOne, BatchSizes, Count, Positive, Quality, Rank, ReplicaState, Share, Strategy


class Phase(StrEnum):
    """Where a job is; the first five have a deadline. After a pause it waits for idle replicas to go on with."""

    FORMING = "forming"
    TRAINING = "training"
    AGGREGATING = "aggregating"
    EVALUATING = "evaluating"
    CANARY = "canary"
    PAUSED = "paused"
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"


class Rules(Struct, frozen=True, forbid_unknown_fields=True):
    """What the operator sets for all jobs. Seconds are per phase; `max_rejected` rounds in a row end the job.

    `strategy` and `rates` say how updates are combined: fedprox needs `hyper.proximal` above 0, product alone takes
    clients that cannot train at the full rank. A slow client uploads what it has after `upload_share` of `train_s`.
    With `canary_s` above 0 a candidate that passed serves the requests of one replica so long before it is published:
    it is rejected if their references say that it is worse than what the others serve by more than `canary_slack`.
    A client leaves after `patience` rounds without a relative fall of its loss by `min_fall` (0: it never does).
    """

    rounds: AtLeastOne = 3
    steps: AtLeastOne = 50
    strategy: Strategy = "fedavg"
    rates: ServerRates = ServerRates()
    quorum: AtLeastOne = 2
    min_clients: AtLeastOne = 3
    form_s: Positive = 30.0
    train_s: Positive = 600.0
    upload_share: Share = 0.9
    aggregate_s: Positive = 60.0
    evaluate_s: Positive = 120.0
    canary_s: Annotated[float, Meta(ge=0)] = 0.0
    canary_slack: Annotated[float, Meta(ge=0)] = 0.1
    canary_tokens: AtLeastOne = 200
    patience: Count = 2
    min_fall: Annotated[float, Meta(ge=0, lt=1)] = 0.01
    max_rejected: AtLeastOne = 2
    hyper: Hyperparams = Hyperparams()

    @property
    def least_rank(self) -> int:
        """At which rank a client must be able to train."""
        return 1 if self.strategy == "product" else self.hyper.rank

    def __post_init__(self) -> None:
        """Raises ValueError."""
        if self.strategy == "fedprox" and self.hyper.proximal == 0:
            raise ValueError("strategy fedprox needs hyper.proximal above 0")


class Trial(Struct):
    """References scored while a candidate served some of the requests: under it, and under anything else."""

    candidate: Quality = Quality(0.0, 0)
    others: Quality = Quality(0.0, 0)


class Client(Struct):
    """A member of the job, training at `rank`. `expected` is false once its update of this round will not come."""

    quality: float
    rank: Rank
    joined: bool = False
    expected: bool = True
    losses: list[float] = field(default_factory=list)


class Job(Struct):
    """`version` is the last accepted adapter version (0: the base), `candidate` the one being made or judged.

    `uploads` maps clients to their mean training loss of this round, `measured` version -> client -> held-out quality;
    `sizes` are the batch sizes that the coordinator last chose; `abandoned` are candidates that a server may still be
    writing though nobody waits for them any more; `wanted` says that a client asked for the job; `lost` counts the
    rounds that a pause cut off.
    """

    id: str
    model: str
    adapter: str
    server: str
    clients: dict[str, Client]
    version: int
    next_version: int
    rules: Rules
    seed: int = 0
    phase: Phase = Phase.FORMING
    round: int = 0
    candidate: int = 0
    deadline_s: float = 0.0
    rejected: int = 0
    accepted: int = 0
    last_loss: float | None = None
    uploads: dict[str, float] = field(default_factory=dict)
    measured: dict[int, dict[str, Quality]] = field(default_factory=dict)
    sizes: dict[str, BatchSizes] = field(default_factory=dict)
    abandoned: list[int] = field(default_factory=list)
    trial: Trial = field(default_factory=Trial)
    wanted: bool = False
    lost: int = 0

    @property
    def ended(self) -> bool:
        """Nothing more will happen."""
        return self.phase in (Phase.DONE, Phase.FAILED)

    @property
    def has_candidate(self) -> bool:
        """Whether a version was made, or is being made, that is not judged yet."""
        return self.phase in (Phase.AGGREGATING, Phase.EVALUATING, Phase.CANARY)

    @property
    def stands(self) -> bool:
        """A client had it paused, and nobody trains for it."""
        return self.phase in (Phase.PAUSED, Phase.WAITING)

    @property
    def turn(self) -> int:
        """How many rounds were begun, without those that a pause cut off."""
        return self.round - self.lost

    @property
    def quorum(self) -> int:
        """Updates that make a round: the setting, but never more than there are clients."""
        return max(1, min(self.rules.quorum, len(self.clients)))


# --- what the service does, in this order


class Send(Struct, frozen=True):
    """A command to one replica."""

    replica: str
    command: Control


class Announce(Struct, frozen=True):
    """An event to all."""

    event: Event


class Return(Struct, frozen=True):
    """A client is free: Combined (or still Idle) -> Serving, its job field cleared."""

    replica: str
    before: ReplicaState
    reason: str


class Score(Struct, frozen=True):
    """A replica's quality score Q changed."""

    replica: str
    quality: float


class Publish(Struct, frozen=True):
    """Make a version current on every replica of the model; held-out cross-entropies before and after.

    Only if `parent` is still current: somebody may have rolled back.
    """

    version: int
    before: float
    after: float
    parent: int = 0


class Clean(Struct, frozen=True):
    """The updates of a round are no longer needed."""

    round: int
    clients: tuple[str, ...]


class Forget(Struct, frozen=True):
    """A candidate version that was rejected or abandoned is no longer needed."""

    version: int


Action = Send | Announce | Return | Score | Publish | Clean | Forget
