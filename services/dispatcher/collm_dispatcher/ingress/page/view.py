"""What the page is sent, once a second: plain data, drawn as it is. Times are Unix seconds, durations seconds."""

from __future__ import annotations

from msgspec import Struct

from collm_common.types import ReplicaState, Slo

Curve = list[tuple[float, float]]


class ReplicaView(Struct, frozen=True):
    """One replica. What it reported last is None while it has not reported lately.

    `limit` is b, `limit_max` the engine's own; `train` is B, 0 while it trains nothing; `sent` counts what it was sent
    and has not answered; `load` is its utilisation over the last minutes, oldest first.
    """

    id: str
    model: str
    state: ReplicaState
    ready: bool
    alive: bool
    quality: float
    job: str
    limit_max: int
    sent: int
    reported_s: float | None
    utilisation: float | None
    running: int | None
    mean_batch: float | None
    limit: int | None
    train: int | None
    sm_share: float | None
    memory_bytes: int | None
    tokens_per_s: float
    versions: dict[str, str]
    load: Curve


class StreamView(Struct, frozen=True):
    """Requests of one model and objective. The last four are this ingress's own, None before its first request.

    `limits` is None where the stream is of no configured class.
    """

    model: str
    name: str
    limits: Slo | None
    waiting: int | None
    offered: int | None = None
    attainment: float | None = None
    goodput_tokens: int | None = None


class Version(Struct, frozen=True):
    """A published version of an adapter, with held-out cross-entropies in nats before and after."""

    version: int
    time_s: float
    before: float | None
    after: float | None


class AdapterView(Struct, frozen=True):
    """`holders` maps the version that is current somewhere to the replicas where it is."""

    name: str
    model: str
    version: int
    published: list[Version]
    holders: dict[str, list[str]]


class RoundView(Struct, frozen=True):
    """`uploads` is each client's mean training loss; `version` the candidate, None before it is aggregated.

    `held_out` is the token-weighted cross-entropy of the candidate, None before anybody judged it.
    """

    number: int
    uploads: dict[str, float]
    version: int | None
    held_out: float | None
    published: bool


class JobView(Struct, frozen=True):
    """`losses` has a curve a client over time, `rounds` what was made of them; `adapter` is "" if nobody said yet."""

    id: str
    adapter: str
    status: str
    reason: str
    round: int
    started_s: float
    changed_s: float
    clients: list[str]
    losses: dict[str, Curve]
    rounds: list[RoundView]


class Span(Struct, frozen=True):
    """A stretch of one replica's time in a state; "away" while it could not serve."""

    state: str
    from_s: float
    to_s: float


class Measured(Struct, frozen=True):
    """Mean duration of `count` engine iterations at (B, b)."""

    train: int
    infer: int
    seconds: float
    count: int


class FitView(Struct, frozen=True):
    """A replica's fitted engine iteration beside what was measured: for each B a line over b, in seconds.

    `error` is the count-weighted mean of |predicted - measured| / measured; None without both. `sure` is false where a
    slope is not from this replica's own samples.
    """

    replica: str
    measured: list[Measured]
    lines: dict[int, Curve]
    error: float | None
    r2: float | None
    sure: bool


class News(Struct, frozen=True):
    """One event in words."""

    time_s: float
    kind: str
    text: str


class View(Struct, frozen=True):
    """The whole page. `since_s` is where the state timeline begins; `tokens` is output tokens per second over time."""

    time_s: float
    since_s: float
    models: list[str]
    tokens_per_s: float
    tokens: Curve
    replicas: list[ReplicaView]
    streams: list[StreamView]
    adapters: list[AdapterView]
    jobs: list[JobView]
    lanes: dict[str, list[Span]]
    fits: list[FitView]
    news: list[News]
