"""Dispatchers that send every request on at once: round robin, least loaded, the better of two."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle

from collm_common.types import ReplicaState
from collm_tools.simulator.request import SimRequest
from collm_tools.simulator.scheduling import NOTHING, Moves, View


class Spreading:
    """Sends each request to the replica that `choose` names among those that are not Idle."""

    every_s = 1.0

    def __init__(self, replicas: Sequence[View]) -> None:
        self.replicas = replicas

    def choose(self, request: SimRequest, able: Sequence[View]) -> View:
        """Where to."""
        raise NotImplementedError

    def arrived(self, now: float, request: SimRequest) -> Moves:
        """Send it on; if all are Idle, to any of them."""
        able = [replica for replica in self.replicas if replica.state is not ReplicaState.IDLE]
        return Moves(release=((request, self.choose(request, able or self.replicas).id),))

    def ended(self, now: float, requests: Sequence[SimRequest]) -> Moves:
        """Nothing is held, so nothing can follow."""
        return NOTHING

    def preempted(self, now: float, requests: Sequence[SimRequest]) -> None:
        """Nothing is ever preempted."""

    def tick(self, now: float) -> Moves:
        """Nothing is planned."""
        return NOTHING


class RoundRobin(Spreading):
    """One after the other: what a plain PEFT deployment behind a load balancer does."""

    def __init__(self, replicas: Sequence[View]) -> None:
        super().__init__(replicas)
        self._turns = cycle(range(len(replicas)))

    def choose(self, request: SimRequest, able: Sequence[View]) -> View:
        """The next one in turn."""
        while True:
            replica = self.replicas[next(self._turns)]
            if replica in able:
                return replica


class LeastLoaded(Spreading):
    """The one with the fewest requests in flight; ties go to the first."""

    def choose(self, request: SimRequest, able: Sequence[View]) -> View:
        """Fewest in flight."""
        return min(able, key=lambda replica: replica.in_flight)


class PowerOfTwo(Spreading):
    """The less loaded of two drawn at random (Mitzenmacher 2001)."""

    def __init__(self, replicas: Sequence[View], seed: int = 0) -> None:
        super().__init__(replicas)
        self._random = random.Random(seed)

    def choose(self, request: SimRequest, able: Sequence[View]) -> View:
        """The less loaded of two."""
        pair = self._random.sample(able, 2) if len(able) > 1 else able
        return min(pair, key=lambda replica: replica.in_flight)
