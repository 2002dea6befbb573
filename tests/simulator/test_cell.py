"""What must hold in a simulated cell whatever decides in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collm_tools.load.traffic import Arrival, gamma
from collm_tools.simulator import lineup
from collm_tools.simulator.cell import Cell
from collm_tools.simulator.offers import offers
from collm_tools.simulator.replica import Replica
from collm_tools.simulator.request import SimRequest
from collm_tools.simulator.scheduling import Moves, Scheduler
from tests.simulator.support import SLO, known, play, replicas, subflows

ADAPTERS = 3


def decider(name: lineup.Name) -> Callable[[Sequence[Replica]], Scheduler]:
    """Makes the scheduler of that name."""
    return lambda cell: lineup.scheduler(name, cell, known(cell), ADAPTERS)


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    gaps = draw(st.lists(st.floats(0, 0.2), max_size=40))
    at_s, found = 0.0, []
    for gap in gaps:
        at_s += gap
        found.append(Arrival(at_s, draw(st.integers(1, 3000)), draw(st.integers(1, 40))))
    return found


class Watched:
    """A scheduler, and every move it made."""

    def __init__(self, inner: Scheduler, cell: Sequence[Replica]) -> None:
        self.inner, self.cell, self.every_s = inner, cell, inner.every_s
        self.released: list[tuple[float, int]] = []
        self.most = 0

    def _note(self, now: float, moves: Moves) -> Moves:
        self.released += [(now, request.number) for request, _ in moves.release]
        self.most = max([self.most, *(replica.running for replica in self.cell)])
        return moves

    def arrived(self, now: float, request: SimRequest) -> Moves:
        return self._note(now, self.inner.arrived(now, request))

    def ended(self, now: float, requests: Sequence[SimRequest]) -> Moves:
        return self._note(now, self.inner.ended(now, requests))

    def preempted(self, now: float, requests: Sequence[SimRequest]) -> None:
        self.inner.preempted(now, requests)

    def tick(self, now: float) -> Moves:
        return self._note(now, self.inner.tick(now))


@pytest.mark.parametrize("name", lineup.NAMES)
@settings(max_examples=25, deadline=None)
@given(offered=arrivals(), count=st.integers(1, 3))
def test_every_request_ends_exactly_once_and_none_begins_before_it_came(
    name: lineup.Name, offered: list[Arrival], count: int
) -> None:
    """A request that is lost, answered twice, or served by foresight; a batch above its limit."""
    cell = replicas(count, most=4)
    watched = Watched(decider(name)(cell), cell)
    ended = play(offered, lambda _: watched, cell, adapters=ADAPTERS)
    assert sorted(request.number for request in ended) == list(range(len(offered)))
    for request in ended:
        assert request.outcome in ("completed", "refused")
        if request.outcome == "completed":
            assert request.arrival_s <= request.released_s <= request.started_s < request.first_s <= request.end_s
        else:
            assert request.end_s == inf
    came = {number: arrival.at_s for number, arrival in enumerate(offered)}
    assert all(now >= came[number] for now, number in watched.released)
    if name != "shepherd":
        assert len({number for _, number in watched.released}) == len(watched.released)
    assert watched.most <= 4


@pytest.mark.parametrize("name", lineup.NAMES)
def test_the_same_seed_gives_the_same_run(name: lineup.Name) -> None:
    """A figure that nobody can get a second time."""

    def run() -> list[tuple[int, float, str]]:
        load = [Arrival(a.at_s, 200, 20) for a in gamma(40, 3.0, 10, seed=7)]
        ended = play(load, decider(name), replicas(3), adapters=ADAPTERS)
        return [(request.number, request.end_s, request.replica) for request in ended]

    assert run() == run()


def test_a_deadline_that_comes_first_is_served_first() -> None:
    """An order by arrival where deadlines differ: one replica of one place, and a late arrival in a hurry."""
    cell = replicas(1, most=1)
    queued = list(offers([Arrival(0.0, 1, 30), Arrival(0.01, 1, 3), Arrival(0.02, 1, 3)], SLO))
    queued[2].deadline_s = 0.9
    ended: list[SimRequest] = []
    Cell(cell, subflows(cell), ended.append).run(queued)
    assert [request.number for request in ended] == [0, 2, 1]


def test_in_flight_stays_within_the_batch_of_the_ideal_mode() -> None:
    """Pacing that queues in the replica: what is released beyond b waits where its deadline no longer counts."""
    cell = replicas(2, most=3)
    policy = subflows(cell)
    most = 0

    class Looking(Watched):
        def _note(self, now: float, moves: Moves) -> Moves:
            nonlocal most
            most = max([most, *(replica.in_flight for replica in cell)])
            return super()._note(now, moves)

    load = [Arrival(n * 0.001, 100, 20) for n in range(300)]
    play(load, lambda _: Looking(policy, cell), cell)
    assert most <= 3
