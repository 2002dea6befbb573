"""dLoRA: adapters have homes, requests go to the least loaded home, and move when the load becomes uneven.

After Wu et al., "dLoRA: Dynamically Orchestrating Requests and Adapters for LoRA LLM Serving" (OSDI 2024). Inside a
replica, weights are merged with the adapter while all that runs is on one, and unmerged while adapters mix: that is the
replica's `merging`. Between replicas, adapters are placed ahead by their long-term load, and requests migrate
when pending work is uneven. Its integer program is solved greedily here, one request at a time from the fullest replica
to the emptiest; loading an adapter costs nothing, which favours it.
"""

from __future__ import annotations

from collections.abc import Sequence

from collm_common.types import ReplicaState
from collm_tools.simulator.request import SimRequest
from collm_tools.simulator.scheduling import NOTHING, Moves, View

FORGET = 0.8


def homes(loads: Sequence[float], replicas: int) -> list[list[int]]:
    """Which replicas hold each adapter: shares of the replicas by load, at least one each, neighbours side by side.

    Adapter k covers the stretch of the replicas that its share of the load takes up.
    """
    total = sum(loads) or 1.0
    even = 1 / (10 * len(loads))
    shares = [max(load / total, even) for load in loads]
    scale = replicas / sum(shares)
    placed: list[list[int]] = []
    start = 0.0
    for share in shares:
        end = start + share * scale
        first, last = round(start), max(round(start) + 1, round(end))
        placed.append([min(index, replicas - 1) for index in range(first, last)])
        start = end
    return placed


class DLora:
    """Rebalances every `every_s`; places adapters anew every `plan_ticks` of these."""

    def __init__(
        self, replicas: Sequence[View], adapters: int, every_s: float = 0.5, plan_ticks: int = 60, slack: int = 2
    ) -> None:
        self.every_s = every_s
        self.migrated = 0
        self._replicas, self._adapters = replicas, adapters
        self._plan_ticks, self._slack = plan_ticks, slack
        self._loads = [1.0] * adapters
        self._counts = [0] * adapters
        self._ticks = 0
        self._homes = homes(self._loads, len(replicas))

    def arrived(self, now: float, request: SimRequest) -> Moves:
        """To the home of its adapter with the least pending work."""
        self._counts[request.adapter] += 1
        able = self._able([self._replicas[index] for index in self._homes[request.adapter]]) or self._able()
        target = min(able, key=lambda replica: (replica.in_flight, replica.id))
        return Moves(release=((request, target.id),))

    def ended(self, now: float, requests: Sequence[SimRequest]) -> Moves:
        """Balance is restored by the tick."""
        return NOTHING

    def preempted(self, now: float, requests: Sequence[SimRequest]) -> None:
        """Nothing is ever preempted."""

    def tick(self, now: float) -> Moves:
        """Migrate what waits where much is pending; now and then place the adapters anew."""
        self._ticks += 1
        if self._ticks % self._plan_ticks == 0:
            self._loads = [
                FORGET * load + (1 - FORGET) * count for load, count in zip(self._loads, self._counts, strict=True)
            ]
            self._counts = [0] * self._adapters
            self._homes = homes(self._loads, len(self._replicas))
        return self._balance()

    def _balance(self) -> Moves:
        able = self._able()
        pending = {replica.id: replica.in_flight for replica in able}
        moves: list[tuple[SimRequest, str, str]] = []
        for source in sorted(able, key=lambda replica: -replica.in_flight):
            # What came last is furthest from its turn.
            for request in reversed(source.waiting):
                target = min(pending, key=pending.__getitem__)
                if pending[source.id] - pending[target] <= self._slack:
                    break
                pending[source.id] -= 1
                pending[target] += 1
                moves.append((request, source.id, target))
        self.migrated += len(moves)
        return Moves(migrate=moves)

    def _able(self, among: Sequence[View] | None = None) -> Sequence[View]:
        here = self._replicas if among is None else among
        return [replica for replica in here if replica.state is not ReplicaState.IDLE]
