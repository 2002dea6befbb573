"""The micro-cycle by its properties: ideal mode, when to release, whom to give it to."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from collm_common.types import Slo
from collm_dispatcher.policy.pacing import (
    Mode,
    Room,
    Shape,
    StepTime,
    combined_mode,
    deal,
    due_s,
    keeps,
    service_s,
    serving_mode,
)

times = st.floats(0.001, 1.0)
limits = st.none() | st.floats(0.01, 20.0)
slos = st.builds(lambda ttft, tpot, e2e: Slo("s", ttft_s=ttft, tpot_s=tpot, e2e_s=e2e), limits, limits, limits)
shapes = st.builds(Shape, st.floats(0, 1), st.floats(1, 100))
batches = st.integers(1, 40)


def line(base_s: float, slope_s: float) -> StepTime:
    """c3 + c1 b."""
    return lambda b: base_s + slope_s * b


@st.composite
def rooms(draw: st.DrawFn) -> list[Room]:
    sizes = draw(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=6))
    return [Room(f"r{rank}", b, in_flight) for rank, (b, in_flight) in enumerate(sizes)]


@given(base_s=times, slope_s=times, shape=shapes, slo=slos, most=batches)
def test_the_ideal_batch_is_the_largest_that_keeps_the_objective(
    base_s: float, slope_s: float, shape: Shape, slo: Slo, most: int
) -> None:
    """A mode one too large breaks every request's objective; one too small wastes the replica."""
    step = line(base_s, slope_s)
    b = serving_mode(step, shape, [slo], most).b
    if not keeps(slo, step, shape, 1):
        assert b == most, "what cannot be kept at all must not cost throughput"
        return
    assert 1 <= b <= most
    assert b == 1 or keeps(slo, step, shape, b)
    assert b == most or not keeps(slo, step, shape, b + 1)


@given(base_s=times, slope_s=times, shape=shapes, slo=slos, most=batches, slower=st.floats(1, 5))
def test_a_slower_replica_never_gets_a_larger_batch(
    base_s: float, slope_s: float, shape: Shape, slo: Slo, most: int, slower: float
) -> None:
    """A comparison the wrong way round."""
    assume(keeps(slo, line(base_s * slower, slope_s * slower), shape, 1))
    before = serving_mode(line(base_s, slope_s), shape, [slo], most).b
    assert serving_mode(line(base_s * slower, slope_s * slower), shape, [slo], most).b <= before


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo("s"), True),
        (Slo("s", e2e_s=2.5), True),
        (Slo("s", e2e_s=2.4), False),
        (Slo("s", tpot_s=0.2), True),
        (Slo("s", tpot_s=0.19), False),
        (Slo("s", ttft_s=0.7), True),
        (Slo("s", ttft_s=0.69), False),
        (Slo("s", ttft_s=9, tpot_s=9, e2e_s=2.4), False),
    ],
)
def test_every_limit_of_an_objective_counts(slo: Slo, kept: bool) -> None:
    """An objective of which only one limit is looked at: prefill 0.5 s, 10 tokens of 0.2 s."""
    assert keeps(slo, lambda b: 0.2, Shape(0.5, 10), 3) is kept


@given(base_s=times, slope_s=times, shape=shapes, b=batches)
def test_the_pace_keeps_exactly_b_in_flight(base_s: float, slope_s: float, shape: Shape, b: int) -> None:
    """Little's law: lambda S = b. A pace above it builds a queue in the replica, one below lets it idle."""
    mode = combined_mode(line(base_s, slope_s), shape, b)
    assert mode.b == b
    assert mode.service_s == service_s(line(base_s, slope_s), shape, b)
    assert mode.rate is not None
    assert math.isclose(mode.rate * mode.service_s, b)


def test_without_a_fit_the_engines_own_limit_is_the_mode() -> None:
    """A pace invented from nothing."""
    assert serving_mode(None, Shape(), [Slo("s", e2e_s=0.001)], 8) == Mode(8)
    assert combined_mode(None, Shape(), 3) == Mode(3)
    assert Mode(8).rate is None


@given(
    now=st.floats(0, 100),
    queued=st.integers(1, 20),
    room=st.integers(1, 20),
    ahead_s=st.floats(-5, 50),
    service=st.none() | times,
    hold_s=st.floats(0, 5),
)
def test_holding_back_never_costs_a_deadline(
    now: float, queued: int, room: int, ahead_s: float, service: float | None, hold_s: float
) -> None:
    """A request that is held back to fill a batch and then misses its deadline because of that."""
    deadline_s = now + ahead_s
    due = due_s(now, queued, room, deadline_s, Mode(room, service), hold_s)
    assert now <= due <= now + hold_s
    if queued >= room or service is None:
        assert due == now
    else:
        assert due == now or due + service <= deadline_s + 1e-9


@given(offered=rooms(), count=st.integers(0, 40))
def test_dealing_fills_rooms_and_nothing_more(offered: list[Room], count: int) -> None:
    """More than b in flight at a replica, or room that is left while requests wait."""
    dealt = deal(offered, count)
    free = {room.id: max(0, room.b - room.in_flight) for room in offered}
    assert len(dealt) == min(count, sum(free.values()))
    assert all(dealt.count(id_) <= most for id_, most in free.items())


@given(offered=rooms(), count=st.integers(1, 40))
def test_the_replica_with_the_smallest_share_gets_the_next(offered: list[Room], count: int) -> None:
    """One replica that is filled while another one stands empty."""
    dealt = deal(offered, count)
    assume(dealt)
    in_flight = {room.id: room.in_flight for room in offered}
    for id_ in dealt:
        shares = {room.id: in_flight[room.id] / room.b for room in offered if in_flight[room.id] < room.b}
        assert shares[id_] == min(shares.values())
        in_flight[id_] += 1


def test_ties_go_to_the_preferred_replica() -> None:
    """An order of preference that is lost on the way."""
    assert deal([Room("best", 2, 0), Room("worse", 2, 0)], 3) == ["best", "worse", "best"]
