"""The policies against the exact optimum of the offline objective, on instances small enough to solve."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collm_common.types import ReplicaState, Slo
from collm_dispatcher.policy.fill import Carrier, preference
from collm_dispatcher.policy.micro import Lane, MicroCycle
from collm_dispatcher.policy.pacing import Mode
from collm_dispatcher.policy.queue import DeadlineQueue, Waiting
from collm_tools.simulator.exact import Job, Server, best

SLO = Slo("s", late="reject")


def steady(b: int, service_s: float, quality: float = 1.0) -> Server:
    return Server(b, lambda n: service_s, quality)


def test_known_optima() -> None:
    """A yardstick that is wrong itself."""
    assert best([], [steady(1, 1.0)]) == 0
    assert best([Job(0, 1), Job(0, 1)], [steady(1, 1.0)]) == 1
    assert best([Job(0, 1), Job(0, 1)], [steady(2, 1.0)]) == 2
    assert best([Job(0, 1), Job(0.5, 1.5)], [steady(2, 1.0)]) == 1
    assert best([Job(0, 1), Job(0.5, 1.5)], [steady(1, 1.0), steady(1, 1.0)]) == 2
    assert best([Job(0, 9), Job(0, 9)], [steady(1, 1.0, quality=1), steady(1, 1.0, quality=3)]) == 6
    assert best([Job(0, 0.9)], [steady(1, 1.0)]) == 0


def test_waiting_for_a_full_batch_can_be_best() -> None:
    """A solver that only ever starts a batch at the first arrival."""
    jobs = [Job(0, 3), Job(1, 3), Job(1, 3)]
    assert best(jobs, [steady(3, 2.0)]) == 3


def play(jobs: Sequence[Job], servers: Sequence[Server]) -> float:
    """What the policies make of the jobs as they come: earliest deadline first, into the best replica that is free."""
    queue = DeadlineQueue()
    micro = MicroCycle(queue)
    ranked = sorted(range(len(servers)), key=lambda n: preference(_carrier(n, servers[n])))
    free_s, value = [0.0] * len(servers), 0.0
    moments = [job.arrival_s for job in jobs]
    heapq.heapify(moments)
    seen: set[int] = set()
    while moments:
        now = heapq.heappop(moments)
        for number, job in enumerate(jobs):
            if job.arrival_s <= now and number not in seen:
                seen.add(number)
                queue.add(Waiting("s", str(number), str(number), "i", 0, job.arrival_s, job.deadline_s, SLO))
        queue.shed(now)
        free = [n for n in ranked if free_s[n] <= now]
        micro.follow([Lane(str(n), Mode(servers[n].b)) for n in free], {"s": [str(n) for n in free]})
        for n in free:
            micro.count(str(n), 0)
        released, _ = micro.decide(now, len(jobs))
        for n in free:
            batch = [release.item for release in released if release.replica == str(n)]
            if batch:
                end_s = now + servers[n].service_s(len(batch))
                free_s[n] = end_s
                heapq.heappush(moments, end_s)
                value += servers[n].quality * sum(end_s <= item.deadline_s for item in batch)
            for item in batch:
                queue.remove(item)
    return value


def _carrier(number: int, server: Server) -> Carrier:
    mode = Mode(server.b, server.service_s(server.b))
    return Carrier(str(number), ReplicaState.SERVING, True, mode, server.quality)


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[Job], list[Server]]:
    tenths = st.integers(0, 30).map(lambda n: n / 10)
    rows = draw(st.lists(st.tuples(tenths, tenths), max_size=6))
    sizes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 10), st.integers(1, 3)), min_size=1, max_size=2))
    servers = [steady(b, tenth / 10, quality) for b, tenth, quality in sizes]
    return [Job(arrival_s, arrival_s + slack_s) for arrival_s, slack_s in rows], servers


@settings(max_examples=60, deadline=None)
@given(instances())
def test_no_policy_beats_the_optimum(instance: tuple[list[Job], list[Server]]) -> None:
    """A yardstick that is too short, or a policy that serves a request twice, early, or late and still counts it."""
    jobs, servers = instance
    assert play(jobs, servers) <= best(jobs, servers)


@pytest.mark.parametrize("seed", range(10))
def test_a_load_that_fits_is_served_whole(seed: int) -> None:
    """A policy that loses requests although each could be served as it comes."""
    draw = random.Random(seed)
    servers = [steady(2, 0.2), steady(2, 0.2)]
    jobs = [Job(at_s := n * 0.2 + draw.uniform(0, 0.1), at_s + 0.5) for n in range(6)]
    assert play(jobs, servers) == best(jobs, servers) == len(jobs)


def test_under_overload_the_policies_come_near_the_optimum() -> None:
    """A change of policy that costs goodput where it is scarce: twice the load that two replicas can carry."""
    got = optimum = 0.0
    for seed in range(25):
        draw = random.Random(seed)
        servers = [steady(2, 0.5), steady(1, 0.4, quality=1.5)]
        jobs = [Job(at_s := draw.uniform(0, 0.5), at_s + draw.uniform(0.4, 1.6)) for _ in range(6)]
        got, optimum = got + play(jobs, servers), optimum + best(jobs, servers)
    assert got >= 0.8 * optimum, (got, optimum)
