"""The macro-cycle: which replicas carry which stream, which Idle ones are promoted, how much training is taken back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from collm_common.types import ReplicaState
from collm_dispatcher.policy.fill import Carrier, Filled, fill, fitted, preference
from collm_dispatcher.policy.pacing import Mode
from collm_dispatcher.policy.recall import Patience, Recall, Steps

QUIET = 0.01
"""Requests a second below which a stream that nothing waits for puts no limit on anybody's batch."""


class Demand(Struct, frozen=True):
    """Of one stream: requests that wait, and the arrival rate (1/s) to be ready for."""

    queued: int
    rate: float


class Limits(Struct, frozen=True):
    """`headroom` is spare capacity (fraction); a backlog is to be gone in `drain_s`.

    Training gets back what was taken once nothing waits and the demand has been below `calm` of the capacity.
    """

    headroom: float = 0.2
    drain_s: float = 2.0
    calm: float = 0.7
    patience: Patience = Patience()


class Plan(Struct, frozen=True):
    """`routes` names who takes the requests of each stream, by preference, `modes` the batch each of them runs.

    Both are read by the micro-cycle; the loop applies the others. `promote`: Idle to Serving, with the `reason` for
    the event. `recall`: steps of Combined replicas.
    """

    routes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    modes: Mapping[str, Mode] = field(default_factory=dict)
    promote: tuple[str, ...] = ()
    recall: Steps = Steps()
    reason: str = ""

    @property
    def carriers(self) -> tuple[str, ...]:
        """Everybody who takes requests."""
        return tuple(self.modes)


class Balance:
    """Keeps from tick to tick only what was taken back from training."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.recall = Recall(self.limits.patience)

    def tick(self, replicas: Sequence[Carrier], demands: Mapping[str, Demand]) -> Plan:
        """One macro-cycle; `demands` by stream."""
        usable = sorted((replica for replica in replicas if replica.usable), key=preference)
        active = [replica for replica in usable if replica.state is not ReplicaState.IDLE]
        idle = [replica for replica in usable if replica.state is ReplicaState.IDLE]
        rates = {stream: wanted(demand, self.limits) for stream, demand in demands.items()}
        queued = sum(demand.queued for demand in demands.values())
        promoted = _promotion(active, idle, rates, queued)
        after = sorted([*active, *promoted], key=preference)
        filled = fill(after, rates)
        missing = shortage(after, filled, rates, queued) if len(promoted) == len(idle) else 0.0
        combined = [replica for replica in active if replica.state is ReplicaState.COMBINED]
        calm = not queued and filled.load / (1 + self.limits.headroom) <= self.limits.calm * len(after)
        return Plan(
            routes=filled.routes,
            modes=filled.modes,
            promote=tuple(replica.id for replica in promoted),
            recall=self.recall.tick(combined, missing, calm),
            reason=f"{queued} wait, {_expected(demands):.1f}/s expected" if promoted else "",
        )


def wanted(demand: Demand, limits: Limits) -> float:
    """Capacity (1/s) for the forecast with headroom and for the backlog; 0 if the stream is quiet."""
    if not demand.queued and demand.rate < QUIET:
        return 0.0
    return demand.rate * (1 + limits.headroom) + demand.queued / limits.drain_s


def shortage(active: Sequence[Carrier], filled: Filled, rates: Mapping[str, float], queued: int) -> float:
    """How many replicas are missing; without fits: by how much the queue exceeds all batches, as a share of them."""
    if active and fitted(active, [*rates]):
        return filled.missing
    places = sum(replica.mode.b for replica in active)
    return max(0.0, queued / max(1, places) - 1) if active else float(queued > 0)


def _promotion(
    active: Sequence[Carrier], idle: Sequence[Carrier], rates: Mapping[str, float], queued: int
) -> list[Carrier]:
    """The first of the Idle ones that cover the shortage; where nobody is active, only waiting work counts."""
    if not active and not queued:
        return []
    count = 0
    while count < len(idle):
        after = sorted([*active, *idle[:count]], key=preference)
        missing = shortage(after, fill(after, rates), rates, queued)
        if missing <= 0:
            break
        count += max(1, int(missing))
    return [*idle[:count]]


def _expected(demands: Mapping[str, Demand]) -> float:
    return sum(demand.rate for demand in demands.values())
