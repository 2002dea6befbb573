"""The loop around the policies: virtual time jumps to the next arrival, completion, tick or report."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from math import inf

from collm_common.types import ReplicaState
from collm_tools.simulator.replica import Replica
from collm_tools.simulator.request import SimRequest
from collm_tools.simulator.scheduling import Moves, Scheduler

Observer = Callable[[SimRequest], None]
Timer = Callable[[float], None]


class Cell:
    """Replicas and a scheduler. `observe` sees each request once, when it has ended.

    Timers run every so many seconds, from one period into the run on, until the last request has ended.
    """

    def __init__(self, replicas: Iterable[Replica], scheduler: Scheduler, observe: Observer) -> None:
        self.replicas: Mapping[str, Replica] = {replica.id: replica for replica in replicas}
        self.scheduler, self.now = scheduler, 0.0
        self.open = 0
        self.on_state: list[Callable[[float, Replica, ReplicaState, str], None]] = []
        self._observe = observe
        self._order = count()
        self._agenda: list[tuple[float, int, Replica | Timer]] = []
        self._timers: list[tuple[float, Timer]] = []
        self.every(scheduler.every_s, lambda now: self.apply(scheduler.tick(now)))

    def every(self, period_s: float, timer: Timer) -> None:
        """Call `timer(now)` every `period_s` seconds."""
        self._timers.append((period_s, timer))

    def at(self, time_s: float, timer: Timer) -> None:
        """Call `timer(now)` once."""
        heapq.heappush(self._agenda, (time_s, next(self._order), timer))

    def run(self, arrivals: Iterable[SimRequest]) -> None:
        """Offer the requests, in order of arrival, and go on until all have ended."""
        for period_s, timer in self._timers:
            self._repeat(period_s, timer)
        coming = iter(arrivals)
        request = next(coming, None)
        while request is not None or self.open:
            next_s = request.arrival_s if request is not None else inf
            if self._agenda and self._agenda[0][0] < next_s:
                self._event(*heapq.heappop(self._agenda))
            elif request is not None:
                self.now = next_s
                self.open += 1
                self.apply(self.scheduler.arrived(next_s, request))
                request = next(coming, None)

    def _event(self, time_s: float, _: int, what: Replica | Timer) -> None:
        if not isinstance(what, Replica):
            self.now = time_s
            what(time_s)
        elif what.next_s == time_s:
            self.now = time_s
            what.step(time_s)
            self.settle(what)

    def _repeat(self, period_s: float, timer: Timer) -> None:
        def again(now: float) -> None:
            timer(now)
            self.at(now + period_s, again)

        self.at(self.now + period_s, again)

    # --- moves

    def settle(self, replica: Replica) -> None:
        """A replica was touched: note what ended there, and when something happens next."""
        if replica.next_s < inf:
            heapq.heappush(self._agenda, (replica.next_s, next(self._order), replica))
        if ended := replica.take_ended():
            for request in ended:
                self._close(request)
            self.apply(self.scheduler.ended(self.now, ended))

    def apply(self, moves: Moves) -> None:
        """Do what the scheduler decided."""
        now = self.now
        for id_ in moves.preempt:
            self._preempt(self.replicas[id_])
        for request, source, target in moves.migrate:
            if self.replicas[source].withdraw(request):
                self._release(request, self.replicas[target])
        for request, id_ in moves.release:
            request.released_s = now
            self._release(request, self.replicas[id_])
        for request in moves.refuse:
            request.outcome = "refused"
            self._close(request)
        for id_ in moves.promote:
            self.change(self.replicas[id_], ReplicaState.SERVING, "promoted")
        for id_ in moves.stop:
            self.change(self.replicas[id_], ReplicaState.SERVING, "recall: the dispatcher needs its capacity")
        for new in moves.resize:
            replica = self.replicas[new.replica]
            replica.configure(now, new.infer, new.train, new.paused)
            self.settle(replica)

    def change(self, replica: Replica, after: ReplicaState, reason: str) -> None:
        """A transition of state, with its observers."""
        before, replica.state = replica.state, after
        for observer in self.on_state:
            observer(self.now, replica, before, reason)

    def _release(self, request: SimRequest, replica: Replica) -> None:
        request.replica = replica.id
        replica.add(self.now, request)
        self.settle(replica)

    def _preempt(self, replica: Replica) -> None:
        thrown: Sequence[SimRequest] = replica.preempt(self.now)
        for request in thrown:
            request.first_s = request.started_s = inf
        self.scheduler.preempted(self.now, thrown)
        self.settle(replica)

    def _close(self, request: SimRequest) -> None:
        self.open -= 1
        self._observe(request)
