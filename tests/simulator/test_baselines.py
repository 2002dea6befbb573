"""Each rival does what its own paper claims."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collm_common.types import Slo
from collm_tools.load.traffic import Arrival
from collm_tools.simulator.baselines.dlora import DLora, homes
from collm_tools.simulator.baselines.shepherd import Shepherd, Stream
from collm_tools.simulator.baselines.spreading import LeastLoaded, PowerOfTwo, RoundRobin
from collm_tools.simulator.cell import Cell
from collm_tools.simulator.hardware import MERGED_DECODE
from collm_tools.simulator.offers import offers
from collm_tools.simulator.replica import Replica
from collm_tools.simulator.request import SimRequest
from tests.simulator.support import HARDWARE, SLO, known, play, replicas

PATIENT = Slo("p", e2e_s=100.0, late="reject")


def request(number: int, adapter: int = 0, arrival_s: float = 0.0, slo: Slo = PATIENT, output: int = 10) -> SimRequest:
    deadline_s = slo.deadline(arrival_s, output)
    return SimRequest(number, arrival_s, deadline_s, 10, output, slo, adapter)


def targets(scheduler: RoundRobin | LeastLoaded | PowerOfTwo | DLora, requests: Sequence[SimRequest]) -> list[str]:
    return [id_ for item in requests for _, id_ in scheduler.arrived(0.0, item).release]


# --- spreading


def test_round_robin_goes_round() -> None:
    """A turn that is skipped or taken twice."""
    assert targets(RoundRobin(replicas(3)), [request(n) for n in range(6)]) == ["r0", "r1", "r2"] * 2


def test_least_loaded_goes_where_the_least_is_in_flight() -> None:
    """A load that counts what runs and forgets what waits."""
    cell = replicas(2, most=1)
    for number in range(3):
        cell[0].add(0.0, request(number))
    cell[1].add(0.0, request(3))
    assert targets(LeastLoaded(cell), [request(4)]) == ["r1"]


def test_two_choices_keep_the_fullest_replica_far_below_one_choice() -> None:
    """A second choice that is not compared: the maximum over 50 replicas would exceed the mean by far more."""
    one, cell, draw = [0] * 50, replicas(50, most=1), random.Random(1)
    policy = PowerOfTwo(cell, seed=1)
    by_id = {replica.id: replica for replica in cell}
    for number in range(1000):
        (id_,) = targets(policy, [item := request(number)])
        by_id[id_].add(0.0, item)
        one[draw.randrange(50)] += 1
    assert max(replica.in_flight for replica in cell) - 20 <= 4 < max(one) - 20


# --- dLoRA


@given(loads=st.lists(st.floats(0, 100), min_size=1, max_size=12), count=st.integers(1, 20))
def test_every_adapter_has_a_home_and_the_loads_share_the_replicas(loads: list[float], count: int) -> None:
    """An adapter that nobody holds; one with most of the load on a single replica."""
    found = homes(loads, count)
    assert all(0 <= index < count for row in found for index in row)
    assert all(row for row in found)
    heaviest = max(range(len(loads)), key=loads.__getitem__)
    assert len(found[heaviest]) >= max(len(row) for row in found) - 1


def ends(adapters: Sequence[int], merging: bool) -> float:
    """When a replica is done with one request of each adapter, all there at once."""
    replica = Replica("r", HARDWARE, 8, merging=merging)
    replica.b = 0
    for number, adapter in enumerate(adapters):
        replica.add(0.0, request(number, adapter, output=101))
    replica.configure(0.0, 8, 0)
    while replica.next_s < inf:
        replica.step(replica.next_s)
    return max(item.end_s for item in replica.take_ended())


def test_a_batch_of_one_adapter_runs_merged_and_a_mixed_one_does_not() -> None:
    """dLoRA's dynamic batching: a merged batch without LoRA's cost, unmerged as soon as adapters mix."""
    assert ends([1, 1, 1], merging=True) == pytest.approx(MERGED_DECODE * ends([1, 1, 1], merging=False), rel=0.01)
    assert ends([1, 2, 1], merging=True) == pytest.approx(ends([1, 1, 1], merging=False))


def test_waiting_requests_migrate_from_an_overloaded_home() -> None:
    """A skewed load that one replica serves alone while the other, which is not its home, has nothing to do."""
    load = [Arrival(n * 0.005, 10, 40) for n in range(200)]

    def last_end(every_s: float) -> tuple[float, int]:
        cell = replicas(2, most=4, merging=True)
        policy = DLora(cell, adapters=2, every_s=every_s)
        ended = play(load, lambda _: policy, cell, PATIENT, adapters=1)
        assert sorted(item.number for item in ended) == list(range(200))
        return max(item.end_s for item in ended), policy.migrated

    alone, moved = last_end(1e6), last_end(0.1)
    assert alone[1] == 0
    assert moved[1] > 20
    assert moved[0] < 0.75 * alone[0]


# --- Shepherd


def shepherd(cell: Sequence[Replica], adapters: int = 2, groups: int = 1) -> Shepherd:
    return Shepherd(cell, adapters, known(cell)["r0"], groups)


def test_the_largest_feasible_batch_goes_first() -> None:
    """An order by arrival: the stream that fills the replica is not the one that came first."""
    cell = replicas(1, most=4)
    policy = shepherd(cell)
    cell[0].add(0.0, request(99))
    policy._runs["r0"] = 7
    for number, adapter in enumerate([0, 1, 1, 1]):
        assert not policy.arrived(0.0, request(number, adapter)).release or adapter == 1
    while cell[0].next_s < inf:
        cell[0].step(cell[0].next_s)
    moves = policy.ended(1.0, [gone := cell[0].take_ended()[0]]) if not cell[0].in_flight else None
    assert moves is not None
    assert gone.number == 99
    assert [item.adapter for item, _ in moves.release] == [1, 1, 1]


def test_a_batch_three_times_as_large_preempts_and_a_smaller_one_does_not() -> None:
    """Preemption that never happens, or that throws work away for little."""
    cell = replicas(1, most=8)
    policy = shepherd(cell)
    thrown: list[int] = []
    for number in range(4):
        moves = policy.arrived(0.0, request(number, adapter=min(1, number)))
        thrown += [number] if moves.preempt else []
        for item, _ in moves.release:
            cell[0].add(0.0, item)
    assert thrown == []
    moves = policy.arrived(0.0, request(4, adapter=1))
    assert moves.preempt == ["r0"]
    assert [item.number for item, _ in moves.release] == [1, 2, 3, 4]


def test_preempted_requests_are_served_in_the_end() -> None:
    """Work that is thrown out and forgotten."""
    cell = replicas(1, most=8)
    policy = shepherd(cell)
    ended: list[SimRequest] = []
    load = [request(0, 0, 0.0, output=400), *(request(n, 1, 0.1) for n in range(1, 6))]
    Cell(cell, policy, ended.append).run(load)
    assert policy.preemptions == 1
    assert [item.number for item in ended if item.outcome == "completed"] == [1, 2, 3, 4, 5, 0]


def test_a_batch_is_only_as_large_as_its_most_urgent_member_allows() -> None:
    """A batch that is large and late: ten requests that fit one by one, but not all at once."""
    stream, model = Stream(0), known(replicas(1))["r0"]
    hasty = Slo("h", e2e_s=0.125, late="reject")
    for number in range(10):
        stream.push(request(number, slo=hasty))
    size = stream.feasible(0.0, model, 0, 8)
    assert 1 < size < 8
    assert size * 1e-3 + 10 * (0.01 + 0.0005 * size) <= 0.125 + 1e-9
    assert stream.drop(0.03, model)


def test_replicas_follow_the_load_of_the_groups() -> None:
    """A plan that leaves half of the replicas to a stream that has gone quiet."""
    cell = replicas(8)
    policy = shepherd(cell, adapters=2, groups=2)
    play([Arrival(n * 0.01, 10, 2) for n in range(100)], lambda _: policy, cell, SLO, adapters=1)
    policy._streams[0].came, policy._streams[1].came = 70, 10
    policy.tick(10.0)
    assert sorted(len(members) for members in policy._members) == [1, 7]


def test_adapters_are_drawn_evenly() -> None:
    """A mix of adapters in which one has most of the requests."""
    drawn = [item.adapter for item in offers([Arrival(float(n), 1, 1) for n in range(4000)], SLO, adapters=4)]
    assert all(900 < drawn.count(adapter) < 1100 for adapter in range(4))
