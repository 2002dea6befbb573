"""The macro-cycle by its properties: who carries what, who is promoted, how training is taken back."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from collm_common.types import ReplicaState
from collm_dispatcher.policy.balance import Balance, Demand, Limits, Plan, wanted
from collm_dispatcher.policy.fill import Carrier, fair_shares, fill, preference
from collm_dispatcher.policy.pacing import Mode
from collm_dispatcher.policy.recall import Level, Patience, Steps

SERVING, IDLE, COMBINED = ReplicaState.SERVING, ReplicaState.IDLE, ReplicaState.COMBINED
LIMITS = Limits(headroom=0.25, drain_s=2.0, calm=0.5, patience=Patience(step=2, stop=6, resume=3))
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
    train_batch: int = 0,
    alone: Mode | None = None,
) -> Carrier:
    """4 requests a second unless told otherwise."""
    mode = Mode(b, service_s)
    return Carrier(id_, state, usable, mode, quality, alone=alone, train_batch=train_batch)


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


@st.composite
def mixed(draw: st.DrawFn) -> tuple[list[Carrier], dict[str, float]]:
    """Active replicas with a mode for each of three streams, and what these want."""
    streams = ["x", "y", "z"][: draw(st.integers(1, 3))]
    found = []
    for n in range(draw(st.integers(1, 5))):
        modes = {stream: Mode(draw(st.integers(1, 9)), draw(st.floats(0.1, 4))) for stream in streams}
        found.append(Carrier(f"r{n}", SERVING, True, modes["x"], draw(st.floats(0.5, 2)), modes))
    return sorted(found, key=preference), {stream: draw(st.just(0.0) | st.floats(0.1, 60)) for stream in streams}


def plans(demand: Demand, count: int, *cell: Carrier, balance: Balance | None = None) -> list[Plan]:
    balance = balance or Balance(LIMITS)
    return [balance.tick(cell, {"s": demand}) for _ in range(count)]


def steps(demand: Demand, count: int, *cell: Carrier, balance: Balance | None = None) -> list[Steps]:
    return [plan.recall for plan in plans(demand, count, *cell, balance=balance)]


# --- who carries what


@given(cell=cells(), demand=demands)
def test_only_usable_replicas_that_serve_or_are_promoted_get_requests(cell: list[Carrier], demand: Demand) -> None:
    """Requests for a dead, unready or Idle replica."""
    (plan,) = plans(demand, 1, *cell)
    by_id = {carrier.id: carrier for carrier in cell}
    assert all(by_id[id_].usable for id_ in plan.carriers + plan.promote)
    assert all(by_id[id_].state is IDLE for id_ in plan.promote)
    assert all(by_id[id_].state is not IDLE or id_ in plan.promote for id_ in plan.carriers)
    assert {id_ for route in plan.routes.values() for id_ in route} <= {*plan.carriers}


@given(cell=cells(), demand=demands)
def test_whoever_is_usable_serves_when_requests_wait(cell: list[Carrier], demand: Demand) -> None:
    """A cell that leaves requests waiting although a replica is there."""
    (plan,) = plans(demand, 1, *cell)
    if demand.queued and any(carrier.usable for carrier in cell):
        assert plan.routes["s"]


@given(mixed())
def test_every_stream_has_somebody_and_no_batch_breaks_an_objective(
    case: tuple[list[Carrier], dict[str, float]],
) -> None:
    """A quiet stream whose next request waits for ever; a strict stream in the large batch of another one."""
    replicas, rates = case
    filled = fill(replicas, rates)
    by_id = {replica.id: replica for replica in replicas}
    total = sum(_needed(replicas, stream, rate) for stream, rate in rates.items())
    for stream, rate in rates.items():
        assert filled.routes[stream]
        if rate and total <= len(replicas):
            assert all(filled.modes[id_].b <= by_id[id_].mode_of(stream).b for id_ in filled.routes[stream])


def _needed(replicas: list[Carrier], stream: str, rate: float) -> float:
    """At the pace of the slowest, in the smallest batch."""
    b = min(mode.b for replica in replicas for mode in replica.modes.values())
    return rate / min(b / (replica.mode_of(stream).service_s or 1.0) for replica in replicas)


@given(mixed())
def test_a_replica_is_taken_only_when_the_better_ones_are_full(case: tuple[list[Carrier], dict[str, float]]) -> None:
    """Load that is spread thinly: every replica is a little busy, none falls Idle, and none trains."""
    replicas, rates = case
    filled = fill(replicas, rates)
    used = [replica.id in filled.modes for replica in replicas]
    assert used == sorted(used, reverse=True)


def test_the_best_replica_serves_alone_while_it_can() -> None:
    """Answers of lower quality although the better replica had room."""
    cell = [replica("a", quality=1.0), replica("b", quality=2.0), replica("c", quality=1.5)]
    assert plans(Demand(0, 3.0), 1, *cell)[0].carriers == ("b",)
    assert plans(Demand(0, 5.0), 1, *cell)[0].carriers == ("b", "c")
    assert plans(Demand(0, 9.0), 1, *cell)[0].carriers == ("b", "c", "a")


def test_a_strict_stream_gets_replicas_of_its_own() -> None:
    """One request in ten with a tight limit that cuts every batch of the cell to its own."""
    modes = {"strict": Mode(2, 0.5), "loose": Mode(16, 2.0)}
    cell = [Carrier(id_, SERVING, True, modes["loose"], modes=modes) for id_ in "abcd"]
    plan = Balance(LIMITS).tick(cell, {"strict": Demand(0, 3.0), "loose": Demand(0, 12.0)})
    assert plan.routes["strict"] == ("a",)
    assert plan.modes["a"].b == 2
    assert [plan.modes[id_].b for id_ in plan.routes["loose"] if id_ != "a"] == [16, 16]


def test_a_quiet_strict_stream_cuts_nobodys_batch() -> None:
    """A class that nobody uses any more and that still rules."""
    modes = {"strict": Mode(2, 0.5), "loose": Mode(16, 2.0)}
    cell = [Carrier("a", SERVING, True, modes["loose"], modes=modes)]
    plan = Balance(LIMITS).tick(cell, {"strict": QUIET, "loose": Demand(0, 4.0)})
    assert plan.modes["a"].b == 16
    assert plan.routes["strict"] == ("a",)


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 10), min_size=1), st.floats(0, 20))
def test_fair_shares_are_max_min_fair(needs: dict[str, float], total: float) -> None:
    """A stream that floods and takes the share of one that asks for little."""
    shares = fair_shares(needs, total)
    assert sum(shares.values()) <= total + 1e-9
    assert math.isclose(sum(shares.values()), min(total, sum(needs.values())), abs_tol=1e-9)
    for name, share in shares.items():
        assert share <= needs[name]
        if share < needs[name] - 1e-9:
            assert share >= max(shares.values()) - 1e-9


def test_a_flood_leaves_the_other_stream_its_share() -> None:
    """One tenant's stream at ten times the capacity, and nobody for the other one."""
    cell = [replica(id_) for id_ in "ab"]
    plan = Balance(LIMITS).tick(cell, {"flood": Demand(0, 80.0), "small": Demand(0, 3.0)})
    assert plan.routes["small"]
    assert not {*plan.routes["small"]} >= {*plan.routes["flood"]}


# --- who is promoted


@given(cell=cells(), demand=demands)
def test_promotion_goes_on_until_the_demand_is_covered_and_no_further(cell: list[Carrier], demand: Demand) -> None:
    """A promotion too few leaves requests late, one too many stops training for nothing, and every tick again."""
    (plan,) = plans(demand, 1, *cell)
    assert bool(plan.reason) is bool(plan.promote)
    after = [msgspec.structs.replace(c, state=SERVING) if c.id in plan.promote else c for c in cell]
    assert not plans(demand, 1, *after)[0].promote


def test_a_surge_promotes_within_one_macro_cycle() -> None:
    """Replicas that are woken one tick after the other while a burst of 440 % waits."""
    cell = [replica("a"), *(replica(id_, IDLE) for id_ in "bcdef")]
    balance = Balance(LIMITS)
    assert not plans(Demand(0, 2.5), 5, *cell, balance=balance)[-1].promote
    assert plans(Demand(3, 2.5 * 4.4), 1, *cell, balance=balance)[0].promote == ("b", "c", "d")


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


def test_a_quiet_stream_wants_nothing() -> None:
    """A forecast that never reaches zero keeps replicas from training for ever."""
    assert wanted(Demand(0, 0.009), LIMITS) == 0
    assert wanted(Demand(1, 0.0), LIMITS) > 0


# --- how training is taken back


def test_training_is_taken_back_in_steps() -> None:
    """A round that is thrown away by one burst although a smaller B would have done."""
    cell = [replica("a"), replica("t", COMBINED, train_batch=8)]
    assert steps(FLOOD, 4, *cell) == [Steps(), Steps(shrink=("t",)), Steps(), Steps(pause=("t",))]


def test_a_pause_that_does_not_help_ends_the_replicas_part() -> None:
    """A replica that is paused for ever, and a round that waits for it."""
    cell = [replica("a"), replica("t", COMBINED, train_batch=1)]
    found = steps(FLOOD, 9, *cell)
    assert found[1] == Steps(pause=("t",))
    assert [step.stop for step in found if step.stop] == [("t",)]
    assert found.index(Steps(stop=("t",))) >= 1 + LIMITS.patience.stop


def test_only_as_much_training_is_taken_back_as_is_missing() -> None:
    """All rounds of a cell stopped because a fifth of a replica is missing."""
    alone = Mode(8, 1.0)
    cell = [
        replica(id_, COMBINED, train_batch=1, alone=alone, quality=quality) for id_, quality in (("t", 2), ("u", 1))
    ]
    assert steps(Demand(0, 7.0), 2, *cell)[-1] == Steps(pause=("u",))
    assert {*steps(Demand(0, 40.0), 2, *cell)[-1].pause} == {"t", "u"}


def test_training_goes_on_while_an_idle_replica_can_still_help() -> None:
    """Federated rounds that stop although spare replicas stand by."""
    cell = [replica("a"), replica("t", COMBINED), replica("i", IDLE), replica("j", IDLE)]
    assert all(plan.promote == ("i",) and plan.recall == Steps() for plan in plans(Demand(0, 8.0), 5, *cell))


def test_training_resumes_after_lasting_calm() -> None:
    """Training that never starts again, or flips with every request."""
    cell = [replica("a"), replica("t", COMBINED)]
    balance = Balance(LIMITS)
    plans(FLOOD, 3, *cell, balance=balance)
    busy, calm = Demand(0, 0.6 * 8), Demand(0, 0.4 * 8)
    assert not any(step.resume for step in steps(busy, 10, *cell, balance=balance))
    assert [step.resume for step in steps(calm, 4, *cell, balance=balance)] == [(), (), ("t",), ()]


def square_wave(period: int, ticks: int) -> list[tuple[int, Steps]]:
    """What is changed when the load swings between twice the capacity and nothing."""
    cell = [replica("a"), replica("t", COMBINED, train_batch=8)]
    balance = Balance(LIMITS)
    found = []
    for tick in range(ticks):
        demand = Demand(0, 16.0) if tick % period < period / 2 else QUIET
        found.append((tick, balance.tick(cell, {"s": demand}).recall))
    return [(tick, step) for tick, step in found if step != Steps()]


@given(period=st.integers(2, 5))
def test_a_load_that_swings_faster_than_the_patience_is_answered_once(period: int) -> None:
    """Training that is paused and resumed with every swing: each change costs, and none of them helps."""
    changes = [step for _, step in square_wave(period, 300)]
    assert not any(step.resume for step in changes)
    assert len(changes) <= 3


@given(period=st.integers(6, 60))
def test_a_slower_swing_is_followed_at_most_once_each_way(period: int) -> None:
    """Oscillation within one half of a swing: taken back, given back, taken back."""
    changes = square_wave(period, 600)
    swings = 600 / period + 1
    assert sum(bool(step.resume) for _, step in changes) <= swings
    assert sum(bool(step.shrink) for _, step in changes) <= swings
    assert sum(bool(step.pause) for _, step in changes) <= swings


@given(st.lists(st.sampled_from([QUIET, FLOOD, Demand(0, 4.8)]), max_size=60))
def test_pause_and_resume_alternate(sequence: list[Demand]) -> None:
    """A trainer that is paused twice and resumed once stays stopped."""
    balance, told = Balance(LIMITS), []
    for demand in sequence:
        step = balance.tick([replica("a"), replica("t", COMBINED)], {"s": demand}).recall
        told += ["pause"] * len(step.pause) + ["resume"] * len(step.resume)
    assert all(one != other for one, other in pairwise(told))


def test_a_new_leader_resumes_what_its_predecessor_may_have_paused() -> None:
    """A leader that dies between pause and resume leaves training stopped for ever."""
    cell = [replica("t", COMBINED)]
    assert [step.resume for step in steps(QUIET, 5, *cell)] == [(), (), ("t",), (), ()]


def test_a_replica_that_left_training_is_forgotten() -> None:
    """A pause of an earlier job that suppresses the one of the next."""
    balance = Balance(LIMITS)
    plans(FLOOD, 2, replica("t", COMBINED), balance=balance)
    assert balance.recall.level("t") is Level.PAUSED
    plans(FLOOD, 2, replica("t", SERVING), balance=balance)
    assert steps(FLOOD, 1, replica("t", COMBINED), balance=balance)[0].pause == ("t",)
