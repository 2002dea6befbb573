"""Which replicas fall Idle, and which return to Serving (paper section 3; the guard and the floors are ours)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from msgspec import Meta, Struct

from collm_common.types import AtLeastOne, Fraction, ReplicaState

Share = Annotated[float, Meta(ge=0)]
MAX_STRETCH = 4
MAX_DOUBLINGS = 5


class IdleRules(Struct, frozen=True, forbid_unknown_fields=True):
    """`window` T and `return_ticks` T' are in launcher ticks; `alpha` is the quantile, `decay` lambda per tick.

    `headroom` is the share of demand that must be left over.
    """

    window: AtLeastOne = 10
    return_ticks: AtLeastOne = 5
    alpha: Fraction = 0.25
    decay: Share = 0.2
    floor: Fraction = 0.25
    headroom: Share = 0.3


class Move(Struct, frozen=True):
    """A transition to make, if the replica is still in `before`."""

    replica: str
    before: ReplicaState
    after: ReplicaState
    reason: str


@dataclass
class Load:
    """One replica as the launcher sees it: samples of (utilisation, mean batch), newest last, one a tick.

    `capacity` is b, the sequences it can run at once; `combined_capacity` what is left of them while it trains.
    Replicas that are `able` to train do so together if they have the same `base`; `chosen` says that a job has this one
    already. After its n-th return in a row without a job, it falls Idle no more for `rest` ticks, twice as long each
    time.
    """

    state: ReplicaState
    capacity: float
    combined_capacity: float
    samples: list[tuple[float, float]] = field(default_factory=list)
    idle_ticks: int = 0
    futile: int = 0
    rest: int = 0
    base: str = ""
    chosen: bool = False
    able: bool = True

    def become(self, state: ReplicaState, rest: int) -> None:
        """Take over the state; a replica that is Serving again is judged by what it does from now on.

        `rest` ticks are the least between two falls that came to nothing.
        """
        if state is ReplicaState.SERVING and self.state is not ReplicaState.SERVING:
            self.samples = []
        if state is ReplicaState.SERVING and self.state is ReplicaState.IDLE:
            self.rest = rest * 2 ** min(self.futile, MAX_DOUBLINGS)
            self.futile += 1
        if state is ReplicaState.COMBINED:
            self.futile = self.rest = 0
        if state is not ReplicaState.IDLE:
            self.idle_ticks = 0
        self.state = state

    def observe(self, utilisation: float, batch: float, keep: int) -> None:
        """Add one tick's sample and forget what is older than `keep` ticks."""
        self.samples = [*self.samples, (utilisation, batch)][-keep:]
        self.rest = max(0, self.rest - 1)


def ewma(values: Sequence[float], decay: float) -> float:
    """sum w_t' v_t' with w_t' = exp(-decay (t - t')) / sum: newest last (paper section 3)."""
    weights = [math.exp(-decay * age) for age in range(len(values) - 1, -1, -1)]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def quantile(values: Sequence[float], alpha: float) -> float:
    """The alpha-quantile with linear interpolation."""
    ordered = sorted(values)
    at = alpha * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def burstiness(arrivals: Sequence[float]) -> float:
    """sqrt(Var N / E N) of counts per tick, which is the coefficient of variation of the gaps between arrivals.

    1 for Poisson, 0 for a steady stream, more when they come in bursts; 1 when there is nothing to judge by.
    """
    if len(arrivals) < 2 or not any(arrivals):
        return 1.0
    mean = sum(arrivals) / len(arrivals)
    variance = sum((count - mean) ** 2 for count in arrivals) / (len(arrivals) - 1)
    return math.sqrt(variance / mean)


def stretch(ticks: int, volatility: float) -> int:
    """T or T' for this volatility: as given for Poisson, half when steady, at most four times when bursty."""
    return max(1, round(ticks * min(MAX_STRETCH, max(0.5, (1 + volatility) / 2))))


def decide(loads: Mapping[str, Load], rules: IdleRules, volatility: float, start_from: int | None) -> list[Move]:
    """Moves for the replicas of one model at one tick; counts the ticks that Idle ones stay unchosen.

    `start_from` is how many Idle replicas start a job at once, None if no job may start now.
    Serving -> Idle needs a full window, U~ <= U_switch and b~ <= b_switch, and that what stays carries the demand.
    When enough fall Idle for a job to start at once, they stay servers (Combined), at their smaller b. Fewer do not
    fall: they would wait for others who get their requests meanwhile, and are kept from falling by them.
    """
    window = stretch(rules.window, volatility)
    serving = {id_: load for id_, load in loads.items() if load.state is ReplicaState.SERVING}
    ripe = {id_: _averages(load, window, rules) for id_, load in serving.items() if len(load.samples) >= window}
    returns = _returns(loads, rules, volatility)
    back = {move.replica: replace(loads[move.replica], state=ReplicaState.SERVING) for move in returns}
    return [*returns, *_falls({**loads, **back}, ripe, rules, start_from)]


def _averages(load: Load, window: int, rules: IdleRules) -> tuple[float, float]:
    recent = load.samples[-window:]
    return ewma([u for u, _ in recent], rules.decay), ewma([b for _, b in recent], rules.decay)


def _returns(loads: Mapping[str, Load], rules: IdleRules, volatility: float) -> list[Move]:
    patience = stretch(rules.return_ticks, volatility)
    moves = []
    for id_, load in sorted(loads.items()):
        waits = load.state is ReplicaState.IDLE and not load.chosen
        load.idle_ticks = load.idle_ticks + 1 if waits else 0
        if load.idle_ticks > patience:
            reason = f"not chosen in {patience} ticks"
            moves.append(Move(id_, ReplicaState.IDLE, ReplicaState.SERVING, reason))
    return moves


def _falls(
    loads: Mapping[str, Load], ripe: Mapping[str, tuple[float, float]], rules: IdleRules, start_from: int | None
) -> list[Move]:
    if not ripe:
        return []
    # Alone, a replica is always at its own quantile: then the floors decide.
    peers = [*ripe.values()] if len(ripe) > 1 else [(0.0, 0.0)]
    u_switch = max(rules.floor, quantile([u for u, _ in peers], rules.alpha))
    b_quantile = quantile([b for _, b in peers], rules.alpha)
    low: list[tuple[float, str, str]] = []
    for id_, (u, b) in ripe.items():
        b_switch = max(rules.floor * loads[id_].capacity, b_quantile)
        if u <= u_switch and b <= b_switch and not loads[id_].rest:
            low.append((u, id_, f"utilisation {u:.2f} <= {u_switch:.2f} and batch {b:.2f} <= {b_switch:.2f}"))
    chosen = _guard(loads, [id_ for _, id_, _ in sorted(low)], rules, start_from)
    reasons = {id_: reason for _, id_, reason in low}
    return [Move(id_, ReplicaState.SERVING, ReplicaState.IDLE, reasons[id_]) for id_ in chosen]


def _guard(loads: Mapping[str, Load], low: list[str], rules: IdleRules, start_from: int | None) -> list[str]:
    """The longest prefix of `low` after whose fall the rest still carries the demand.

    Sequences in flight must fit into the batches that are left, and utilisation into the replicas that are left: the
    quantile alone calls the least busy of three overloaded replicas low.
    """
    averages = [_averages(load, len(load.samples), rules) for load in loads.values() if load.samples]
    demand = (1 + rules.headroom) * sum(batch for _, batch in averages)
    work = (1 + rules.headroom) * sum(utilisation for utilisation, _ in averages)
    idle = [id_ for id_, load in loads.items() if load.state is ReplicaState.IDLE]
    if start_from is not None:
        team = _team(loads, [*idle, *low], start_from)
        low = [id_ for id_ in low if id_ in team]
    for count in range(len(low), 0, -1):
        fallen = [*idle, *low[:count]]
        trains = _team(loads, fallen, start_from)
        if start_from is not None and not trains:
            return []
        serving = len(loads) - len(fallen) + len(trains)
        if serving and capacity(loads, fallen, trains) >= demand and work <= serving:
            return low[:count]
    return []


def _team(loads: Mapping[str, Load], idle: Sequence[str], start_from: int | None) -> list[str]:
    """Those of `idle` that start a job at once: the most on one base, if they are enough."""
    if start_from is None:
        return []
    teams: dict[str, list[str]] = {}
    for id_ in idle:
        if loads[id_].able and not loads[id_].chosen:
            teams.setdefault(loads[id_].base, []).append(id_)
    largest = max(teams.values(), key=len, default=[])
    return largest if len(largest) >= start_from else []


def capacity(loads: Mapping[str, Load], idle: Collection[str], trains: Collection[str]) -> float:
    """Sequences that can be in flight when `idle` replicas take nothing, but those in `trains` serve beside a job."""
    total = 0.0
    for id_, load in loads.items():
        if id_ in trains or load.state is ReplicaState.COMBINED:
            total += load.combined_capacity
        elif id_ not in idle:
            total += load.capacity
    return total
