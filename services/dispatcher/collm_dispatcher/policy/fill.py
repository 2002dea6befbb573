"""Which replicas carry which stream: filled to the ideal mode one after the other, so that the rest can fall Idle.

The offline objective is the sum of |B| Q_i(B) over batches that finish in time (CoLLM, dispatcher): every request
served is worth the quality of the replica that serves it, so capacity is taken from the highest Q first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from collm_common.types import ReplicaState
from collm_dispatcher.policy.pacing import Mode

NOTHING = 1e-9


class Carrier(Struct, frozen=True):
    """A replica as the plan sees it; `usable` is alive and ready, `quality` the launcher's Q.

    `modes` are the ideal modes by stream, `mode` that of a stream which is not among them. `alone` is what `mode`
    would be if its training stood still (None: it does not train, or not known); `train_batch` its B.
    """

    id: str
    state: ReplicaState
    usable: bool
    mode: Mode
    quality: float = 1.0
    modes: Mapping[str, Mode] = field(default_factory=dict)
    alone: Mode | None = None
    train_batch: int = 0

    def mode_of(self, stream: str) -> Mode:
        """The ideal mode for one stream."""
        return self.modes.get(stream, self.mode)


class Filled(Struct, frozen=True):
    """`routes`: who carries each stream, in order of preference; `modes`: the batch each of them runs.

    `missing` is what the demand needs beyond these replicas, as a number of replicas; `load` what it takes of them.
    """

    routes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    modes: Mapping[str, Mode] = field(default_factory=dict)
    missing: float = 0.0
    load: float = 0.0


def preference(replica: Carrier) -> tuple[float, bool, float, str]:
    """Highest Q first; then who does not train, then the larger one."""
    return (-replica.quality, replica.state is ReplicaState.COMBINED, -replica.mode.b, replica.id)


def fitted(replicas: Sequence[Carrier], streams: Sequence[str]) -> bool:
    """Whether the pace of every replica is known."""
    return all(replica.mode_of(stream).rate for replica in replicas for stream in streams)


def fill(replicas: Sequence[Carrier], wanted: Mapping[str, float]) -> Filled:
    """Give each stream (`wanted`, requests a second) the first replicas of `replicas`, in their order, that carry it.

    The streams that need the smallest batches come first; who shares a replica with one of them runs its batch. When
    the replicas do not suffice, each stream gets as much of them as it needs, but none more than its fair share.
    Without fits everybody carries everything.
    """
    if not replicas or not fitted(replicas, [*wanted]):
        return _everybody(replicas, [*wanted])
    busy = [stream for stream in wanted if wanted[stream] > NOTHING]
    needs = {stream: _need(replicas, stream, wanted[stream]) for stream in busy}
    shares = fair_shares(needs, float(len(replicas)))
    filling = _Filling(replicas)
    for stream in sorted(busy, key=lambda stream: (_mean_b(replicas, stream), stream)):
        filling.place(stream, wanted[stream] * shares[stream] / needs[stream])
    for stream in wanted.keys() - needs.keys():
        filling.admit(stream)
    missing = sum(needs.values()) - sum(shares.values()) + filling.left_over
    return Filled(filling.routes, filling.modes, missing if missing > NOTHING else 0.0, sum(needs.values()))


def fair_shares(needs: Mapping[str, float], total: float) -> dict[str, float]:
    """Max-min fairness: who needs less than an equal share gets it all, the others share the rest equally."""
    shares: dict[str, float] = {}
    left = total
    for count, stream in enumerate(sorted(needs, key=lambda stream: (needs[stream], stream))):
        shares[stream] = min(needs[stream], left / (len(needs) - count))
        left -= shares[stream]
    return shares


class _Filling:
    """Replicas being filled: the share of each one's time that is given away, and the batch it runs."""

    def __init__(self, replicas: Sequence[Carrier]) -> None:
        self._replicas = replicas
        self._used = dict.fromkeys((replica.id for replica in replicas), 0.0)
        self.routes: dict[str, tuple[str, ...]] = {}
        self.modes: dict[str, Mode] = {}
        self.left_over = 0.0

    def place(self, stream: str, rate: float) -> None:
        """Take of the replicas, in their order, what is left of each, until the stream has its rate."""
        chosen: list[str] = []
        free = [replica for replica in self._replicas if self._used[replica.id] < 1 - NOTHING]
        for replica in free:
            if rate <= NOTHING:
                break
            mode = self._shared(replica, stream)
            pace = mode.rate or NOTHING
            taken = min(pace * (1 - self._used[replica.id]), rate)
            self._used[replica.id] += taken / pace
            self.modes[replica.id] = mode
            chosen.append(replica.id)
            rate -= taken
        self.routes[stream] = tuple(chosen) or tuple(replica.id for replica in self._replicas)
        self.left_over += max(0.0, rate) / (self._replicas[-1].mode_of(stream).rate or 1.0)

    def admit(self, stream: str) -> None:
        """A stream without demand may use who carries others: its next request need not wait for the next plan."""
        first = self._replicas[0]
        self.modes = self.modes or {first.id: first.mode_of(stream)}
        self.routes[stream] = tuple(self.modes)

    def _shared(self, replica: Carrier, stream: str) -> Mode:
        """The stream's mode, in no larger a batch than those bear that are there already."""
        own, there = replica.mode_of(stream), self.modes.get(replica.id)
        if there is None or there.b >= own.b:
            return own
        # Time in a batch does not fall with its size, so this pace is never too high.
        return Mode(there.b, own.service_s)


def _everybody(replicas: Sequence[Carrier], streams: Sequence[str]) -> Filled:
    ids = tuple(replica.id for replica in replicas)
    modes = {
        replica.id: min((replica.mode_of(stream) for stream in streams), key=lambda mode: mode.b, default=replica.mode)
        for replica in replicas
    }
    return Filled(dict.fromkeys(streams, ids), modes)


def _mean_b(replicas: Sequence[Carrier], stream: str) -> float:
    return sum(replica.mode_of(stream).b for replica in replicas) / max(1, len(replicas))


def _need(replicas: Sequence[Carrier], stream: str, rate: float) -> float:
    """How many of `replicas`, in their order, a rate takes; beyond the last one, more of their mean."""
    count = 0.0
    for replica in replicas:
        pace = replica.mode_of(stream).rate or 0.0
        if rate <= pace:
            return count + rate / pace
        rate -= pace
        count += 1
    mean = sum(replica.mode_of(stream).rate or 0.0 for replica in replicas) / len(replicas)
    return count + rate / mean
