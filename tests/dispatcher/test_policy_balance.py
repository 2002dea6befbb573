"""The macro-cycle by its properties: who carries the load, who is promoted, whose training pauses."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from collm_common.types import ReplicaState
from collm_dispatcher.policy.balance import (
    Balance,
    Carrier,
    Demand,
    Limits,
    Plan,
    carriers,
    preference,
    shortage,
    wanted,
)
from collm_dispatcher.policy.pacing import Mode

SERVING, IDLE, COMBINED = ReplicaState.SERVING, ReplicaState.IDLE, ReplicaState.COMBINED
LIMITS = Limits(headroom=0.25, drain_s=2.0, calm=0.5, pause_ticks=2, resume_ticks=3)
QUIET, FLOOD = Demand(0, 0.0), Demand(100, 50.0)

demands = st.builds(Demand, st.integers(0, 60), st.floats(0, 60))


def replica(
    id_: str,
    state: ReplicaState = SERVING,
    *,
    b: int = 4,
    service_s: float | None = 1.0,
    quality: float = 1.0,
    usable: bool = True,
) -> Carrier:
    """4 requests a second unless told otherwise."""
    return Carrier(id_, state, usable, Mode(b, service_s), quality)


@st.composite
def cells(draw: st.DrawFn, fitted: bool | None = None) -> list[Carrier]:
    rows = draw(
        st.lists(
            st.tuples(
                st.sampled_from(ReplicaState), st.integers(1, 8), st.floats(0.1, 4), st.floats(0.5, 2), st.booleans()
            ),
            max_size=6,
        )
    )
    known = draw(st.booleans()) if fitted is None else fitted
    return [
        replica(f"r{n}", state, b=b, service_s=service if known else None, quality=quality, usable=usable)
        for n, (state, b, service, quality, usable) in enumerate(rows)
    ]


def plans(demand: Demand, count: int, *cell: Carrier, balance: Balance | None = None) -> list[Plan]:
    balance = balance or Balance(LIMITS)
    return [balance.tick(cell, demand) for _ in range(count)]


@given(cell=cells(), demand=demands)
def test_only_usable_replicas_that_serve_or_are_promoted_get_requests(cell: list[Carrier], demand: Demand) -> None:
    """Requests for a dead, unready or Idle replica."""
    plan = Balance(LIMITS).tick(cell, demand)
    by_id = {carrier.id: carrier for carrier in cell}
    assert len(set(plan.carriers)) == len(plan.carriers)
    assert all(by_id[id_].usable for id_ in plan.carriers + plan.promote)
    assert all(by_id[id_].state is IDLE for id_ in plan.promote)
    assert all(by_id[id_].state is not IDLE or id_ in plan.promote for id_ in plan.carriers)


@given(cell=cells(), demand=demands)
def test_whoever_is_usable_serves_when_requests_wait(cell: list[Carrier], demand: Demand) -> None:
    """A cell that leaves requests waiting although a replica is there."""
    assume(demand.queued and any(carrier.usable for carrier in cell))
    assert Balance(LIMITS).tick(cell, demand).carriers


@given(cell=cells(fitted=True), demand=demands)
def test_the_fewest_best_replicas_that_carry_the_demand_do(cell: list[Carrier], demand: Demand) -> None:
    """A lull in which everybody gets a little, so that nobody ever falls Idle; or too few for the forecast."""
    active = sorted(cell, key=preference)
    chosen = carriers(active, demand, LIMITS)
    assert chosen == active[: len(chosen)]
    capacity = [carrier.mode.rate or 0.0 for carrier in chosen]
    if len(chosen) < len(active):
        assert sum(capacity) >= wanted(demand, LIMITS) - 1e-6
    if len(chosen) > 1:
        assert sum(capacity[:-1]) < wanted(demand, LIMITS) + 1e-6


@given(cell=cells(fitted=False), demand=demands)
def test_without_fits_everybody_who_serves_shares_the_load(cell: list[Carrier], demand: Demand) -> None:
    """A capacity that nobody has measured decides who gets nothing."""
    assert carriers(cell, demand, LIMITS) == cell


@given(cell=cells(), demand=demands, more=demands)
def test_more_demand_never_means_fewer_carriers(cell: list[Carrier], demand: Demand, more: Demand) -> None:
    """A sign that is wrong in the shortage."""
    grown = Demand(demand.queued + more.queued, demand.rate + more.rate)
    before, after = Balance(LIMITS).tick(cell, demand), Balance(LIMITS).tick(cell, grown)
    assert set(before.carriers) <= set(after.carriers)


def test_the_highest_quality_carries_first_and_a_trainer_last() -> None:
    """Answers from the worst adapter while the best one idles."""
    cell = [replica("a", quality=1.0), replica("b", COMBINED, quality=2.0), replica("c", quality=2.0)]
    (plan,) = plans(Demand(0, 5.0), 1, *cell)
    assert plan.carriers == ("c", "b")


@given(cell=cells(), demand=demands)
def test_promotions_end_when_the_shortage_is_covered(cell: list[Carrier], demand: Demand) -> None:
    """Every Idle replica is woken by one request; or a burst waits until the launcher looks again."""
    for _ in range(len(cell) + 1):
        active = [carrier for carrier in cell if carrier.usable and carrier.state is not IDLE]
        plan = Balance(LIMITS).tick(cell, demand)
        assert bool(plan.reason) is bool(plan.promote)
        if active and shortage(active, demand, LIMITS) <= 0:
            assert not plan.promote
        cell = [msgspec.structs.replace(c, state=SERVING) if c.id in plan.promote else c for c in cell]
    idle = [carrier for carrier in cell if carrier.usable and carrier.state is IDLE]
    assert not idle or not plan.promote
    assert not idle or shortage(active, demand, LIMITS) <= 1e-6 or not (active or demand.queued)


def test_an_idle_cell_wakes_for_waiting_requests_only() -> None:
    """A forecast that has not died down yet undoes the launcher's decision at once."""
    cell = [replica("a", IDLE), replica("b", IDLE)]
    assert plans(Demand(0, 3.0), 1, *cell)[0].promote == ()
    assert plans(Demand(1, 0.0), 1, *cell)[0].promote == ("a",)


def test_a_long_queue_wakes_as_many_as_it_fills_at_once() -> None:
    """An idle cell without fits that wakes one replica a tick while a burst waits."""
    cell = [replica(id_, IDLE, service_s=None) for id_ in "abcde"]
    assert plans(Demand(9, 0.0), 1, *cell)[0].promote == ("a", "b", "c")
    assert plans(Demand(100, 0.0), 1, *cell)[0].promote == ("a", "b", "c", "d", "e")


def test_training_pauses_only_after_lasting_overload_and_only_once() -> None:
    """One burst of a moment that stops a round, or a pause command with every tick."""
    cell = [replica("a"), replica("t", COMBINED)]
    assert [plan.pause for plan in plans(FLOOD, 4, *cell)] == [(), ("t",), (), ()]


def test_training_goes_on_while_an_idle_replica_can_still_help() -> None:
    """Federated rounds that stop although spare replicas stand by."""
    cell = [replica("a"), replica("t", COMBINED), replica("i", IDLE), replica("j", IDLE)]
    demand = Demand(0, 8.0)
    assert all(plan.promote == ("i",) and not plan.pause for plan in plans(demand, 5, *cell))


def test_training_resumes_after_lasting_calm() -> None:
    """Training that never starts again, or flips with every request."""
    cell = [replica("a"), replica("t", COMBINED)]
    balance = Balance(LIMITS)
    plans(FLOOD, 3, *cell, balance=balance)
    busy = Demand(0, 0.6 * 8)
    assert not any(plan.resume for plan in plans(busy, 10, *cell, balance=balance))
    calm = Demand(0, 0.4 * 8)
    assert [plan.resume for plan in plans(calm, 4, *cell, balance=balance)] == [(), (), ("t",), ()]


@given(st.lists(st.sampled_from([QUIET, FLOOD, Demand(0, 4.8)]), max_size=60))
def test_pause_and_resume_alternate(sequence: list[Demand]) -> None:
    """A trainer that is paused twice and resumed once stays stopped."""
    balance, told = Balance(LIMITS), []
    for demand in sequence:
        plan = balance.tick([replica("a"), replica("t", COMBINED)], demand)
        told += ["pause"] * len(plan.pause) + ["resume"] * len(plan.resume)
    assert all(one != other for one, other in pairwise(told))


def test_a_new_leader_resumes_what_its_predecessor_may_have_paused() -> None:
    """A leader that dies between pause and resume leaves training stopped for ever."""
    cell = [replica("t", COMBINED)]
    assert [plan.resume for plan in plans(QUIET, 5, *cell)] == [(), (), ("t",), (), ()]


def test_a_replica_that_left_training_is_forgotten() -> None:
    """A pause of an earlier job that suppresses the one of the next."""
    balance = Balance(LIMITS)
    plans(FLOOD, 2, replica("t", COMBINED), balance=balance)
    plans(FLOOD, 1, replica("t", SERVING), balance=balance)
    assert plans(FLOOD, 1, replica("t", COMBINED), balance=balance)[0].pause == ("t",)
