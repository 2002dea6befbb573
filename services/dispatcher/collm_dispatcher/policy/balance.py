"""The macro-cycle: which replicas carry a model's requests, which Idle ones are promoted, who pauses training.

The offline objective is the sum of |B| Q_i(B) over batches that finish in time (CoLLM, dispatcher): every request
served is worth the quality of the replica that serves it, so capacity is taken from the highest Q first and filled to
the ideal mode; what is left over falls Idle.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from collm_common.types import ReplicaState
from collm_dispatcher.policy.pacing import Mode


class Carrier(Struct, frozen=True):
    """A replica as the plan sees it; `usable` is alive and ready, `quality` the launcher's Q."""

    id: str
    state: ReplicaState
    usable: bool
    mode: Mode
    quality: float = 1.0


class Demand(Struct, frozen=True):
    """Requests that wait, and the arrival rate (1/s) to be ready for."""

    queued: int
    rate: float


class Limits(Struct, frozen=True):
    """`headroom` is spare capacity (fraction); a backlog is to be gone in `drain_s`; ticks count for hysteresis.

    Training resumes once nothing waits and the demand is below `calm` of the capacity.
    """

    headroom: float = 0.2
    drain_s: float = 2.0
    calm: float = 0.7
    pause_ticks: int = 2
    resume_ticks: int = 10


class Plan(Struct, frozen=True):
    """`carriers` get new requests (read by the release), in order of preference; the loop applies the others.

    `promote`: Idle to Serving. `pause`, `resume`: training of Combined replicas. `reason` is for the event.
    """

    carriers: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()
    pause: tuple[str, ...] = ()
    resume: tuple[str, ...] = ()
    reason: str = ""


class Balance:
    """Remembers how long overload and calm have lasted, and whose training it paused.

    A replica it knows nothing of yet counts as perhaps paused by an earlier leader, so calm resumes it once.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._over = self._calm = 0
        self._paused: dict[str, bool] = {}

    def tick(self, replicas: Sequence[Carrier], demand: Demand) -> Plan:
        """One macro-cycle."""
        usable = [replica for replica in replicas if replica.usable]
        active = sorted((r for r in usable if r.state is not ReplicaState.IDLE), key=preference)
        idle = sorted((r for r in usable if r.state is ReplicaState.IDLE), key=preference)
        promoted = _promotion(active, idle, demand, self.limits)
        short = shortage(active, demand, self.limits)
        self._count(short > 0 and len(promoted) == len(idle), active, demand)
        combined = [r.id for r in active if r.state is ReplicaState.COMBINED]
        self._paused = {id_: self._paused[id_] for id_ in combined if id_ in self._paused}
        return Plan(
            carriers=tuple(replica.id for replica in carriers([*active, *promoted], demand, self.limits)),
            promote=tuple(replica.id for replica in promoted),
            pause=self._set(combined, True) if self._over >= self.limits.pause_ticks else (),
            resume=self._set(combined, False) if self._calm >= self.limits.resume_ticks else (),
            reason=f"{demand.queued} wait, {demand.rate:.1f}/s expected" if promoted else "",
        )

    def _count(self, over: bool, active: Sequence[Carrier], demand: Demand) -> None:
        self._over = self._over + 1 if over else 0
        capacity = _capacity(active)
        calm = demand.queued == 0 and (capacity is None or demand.rate <= self.limits.calm * capacity)
        self._calm = self._calm + 1 if calm and not over else 0

    def _set(self, combined: Sequence[str], paused: bool) -> tuple[str, ...]:
        changed = tuple(id_ for id_ in combined if self._paused.get(id_) is not paused)
        self._paused |= dict.fromkeys(changed, paused)
        return changed


def preference(replica: Carrier) -> tuple[float, bool, float, str]:
    """Highest Q first; then who does not train, then the larger one."""
    return (-replica.quality, replica.state is ReplicaState.COMBINED, -replica.mode.b, replica.id)


def wanted(demand: Demand, limits: Limits) -> float:
    """Capacity (1/s) for the forecast with headroom and for the backlog."""
    return demand.rate * (1 + limits.headroom) + demand.queued / limits.drain_s


def carriers(active: Sequence[Carrier], demand: Demand, limits: Limits) -> list[Carrier]:
    """The fewest of `active`, in their order, that carry the demand; all of them unless every one has a fit."""
    if _capacity(active) is None:
        return list(active)
    chosen: list[Carrier] = []
    missing = wanted(demand, limits)
    for replica in active:
        if chosen and missing <= 0:
            break
        chosen.append(replica)
        missing -= replica.mode.rate or 0.0
    return chosen


def shortage(active: Sequence[Carrier], demand: Demand, limits: Limits) -> float:
    """By how much (1/s) the demand exceeds the capacity; without fits: by how much the queue exceeds all batches."""
    capacity = _capacity(active)
    if capacity is None:
        return max(0.0, demand.queued - sum(replica.mode.b for replica in active))
    return max(0.0, wanted(demand, limits) - capacity)


def _promotion(active: Sequence[Carrier], idle: Sequence[Carrier], demand: Demand, limits: Limits) -> list[Carrier]:
    """Idle replicas to promote until the shortage is covered; where nobody is active, only waiting work counts."""
    fitted = _capacity(active or idle) is not None
    if active:
        missing = shortage(active, demand, limits)
    else:
        missing = (wanted(demand, limits) if fitted else demand.queued) if demand.queued else 0.0
    chosen: list[Carrier] = []
    for replica in idle:
        if missing <= 0:
            break
        chosen.append(replica)
        missing -= (replica.mode.rate or missing) if fitted else replica.mode.b
    return chosen


def _capacity(replicas: Sequence[Carrier]) -> float | None:
    """Requests a second, or None unless every replica has a fit."""
    rates = [replica.mode.rate for replica in replicas]
    return None if None in rates else sum(rate for rate in rates if rate is not None)
