"""The micro-cycle by its properties: ideal mode, when to release, whom to give it to."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from collm_common.types import Slo
from collm_dispatcher.policy.pacing import (
    WAIT,
    Mode,
    Shape,
    StepTime,
    attained,
    best,
    due_s,
    first_s,
    keeps,
    service_s,
    serving_mode,
    token_s,
)

times = st.floats(0.001, 1.0)
limits = st.none() | st.floats(0.01, 20.0)
slos = st.builds(lambda ttft, tpot, e2e: Slo("s", ttft_s=ttft, tpot_s=tpot, e2e_s=e2e), limits, limits, limits)
shapes = st.builds(Shape, st.floats(0, 1), st.floats(1, 100))
batches = st.integers(1, 40)


def line(base_s: float, slope_s: float) -> StepTime:
    """c3 + c1 b."""
    return lambda b: base_s + slope_s * b


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
    assert b == 1 or attained(slo, step, shape, b, WAIT)
    assert b == most or not attained(slo, step, shape, b + 1, WAIT)


@given(base_s=times, slope_s=times, shape=shapes, slo=slos, most=batches, slower=st.floats(1, 5))
def test_a_slower_replica_never_gets_a_larger_batch(
    base_s: float, slope_s: float, shape: Shape, slo: Slo, most: int, slower: float
) -> None:
    """A comparison the wrong way round. Prefill is slower too: decoding alone would change their shares of time."""
    slow = Shape(shape.prefill_s * slower, shape.output_tokens)
    assume(keeps(slo, line(base_s * slower, slope_s * slower), slow, 1))
    before = serving_mode(line(base_s, slope_s), shape, [slo], most).b
    assert serving_mode(line(base_s * slower, slope_s * slower), slow, [slo], most).b <= before


@pytest.mark.parametrize(
    ("slo", "kept"),
    [
        (Slo("s"), True),
        (Slo("s", e2e_s=3.51), True),
        (Slo("s", e2e_s=3.49), False),
        (Slo("s", tpot_s=0.31), True),
        (Slo("s", tpot_s=0.29), False),
        (Slo("s", ttft_s=0.91), True),
        (Slo("s", ttft_s=0.89), False),
        (Slo("s", ttft_s=9, tpot_s=9, e2e_s=3.49), False),
    ],
)
def test_every_limit_of_an_objective_counts(slo: Slo, kept: bool) -> None:
    """An objective of which only one limit is looked at: prefill 0.5 s, 10 tokens of 0.2 s, two others beside."""
    assert keeps(slo, lambda b: 0.2, Shape(0.5, 10), 3) is kept


@given(base_s=times, slope_s=times, shape=shapes, b=st.integers(2, 40))
def test_more_requests_make_every_latency_longer(base_s: float, slope_s: float, shape: Shape, b: int) -> None:
    """A search by halving over something that falls in between finds a batch that is too large."""
    step = line(base_s, slope_s)
    for latency in (service_s, token_s, first_s):
        assert latency(step, shape, b) >= latency(step, shape, b - 1) - 1e-12


@given(base_s=times, slope_s=times, prefill_s=st.floats(0, 1), tokens=st.floats(1, 100), b=batches)
def test_prefill_and_tokens_add_up_to_the_time_of_a_request(
    base_s: float, slope_s: float, prefill_s: float, tokens: float, b: int
) -> None:
    """Two formulas for one thing: a batch that keeps the end and breaks the pace."""
    step, shape = line(base_s, slope_s), Shape(prefill_s, tokens)
    total = prefill_s + tokens * token_s(step, shape, b)
    assert math.isclose(total, service_s(step, shape, b), rel_tol=1e-9)


def test_the_prefills_of_the_others_count() -> None:
    """Long prompts and short answers: by its own prefill alone, 64 requests would fit into half a second."""
    code = Shape(prefill_s=0.06, output_tokens=28)
    assert best(Slo("s", e2e_s=0.5), lambda b: 0.007, code, 64) == 3


def test_the_batch_gives_up_the_longest_answers_when_that_serves_more() -> None:
    """One answer in ten that can never be in time, and keeps the batch of all others at one."""
    step, slo = line(0.01, 0.001), Slo("s", e2e_s=2.5)
    shape = Shape(0.0, 120.0, (20.0,) * 9 + (1000.0,))
    assert best(slo, step, shape, 80) == 80
    assert best(slo, step, Shape(0.0, 100.0, (100.0,)), 80) == 10


@given(
    base_s=times,
    slope_s=times,
    prefill_s=st.floats(0, 1),
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=8),
    slo=slos,
    most=st.integers(1, 20),
)
def test_no_other_batch_has_more_requests_in_time(
    base_s: float, slope_s: float, prefill_s: float, lengths: list[int], slo: Slo, most: int
) -> None:
    """A search that stops at the first batch it likes."""
    step = line(base_s, slope_s)
    shape = Shape(prefill_s, sum(lengths) / len(lengths), tuple(sorted(map(float, lengths))))
    values = {b: attained(slo, step, shape, b, WAIT) * b / service_s(step, shape, b) for b in range(1, most + 1)}
    b = best(slo, step, shape, most)
    assert (b == 0) is (attained(slo, step, shape, 1) == 0)
    assert b == 0 or values[b] >= max(values.values()) * (1 - 1e-9)


def test_a_batch_leaves_time_to_wait_for_it() -> None:
    """Overload: everybody is released at the last moment, into a batch that takes the whole limit, and is late."""
    b = best(Slo("s", e2e_s=1.0), line(0.0, 0.001), Shape(0.0, 10.0), 500)
    assert service_s(line(0.0, 0.001), Shape(0.0, 10.0), b) == pytest.approx(0.8)
    assert best(Slo("s", e2e_s=0.0105), line(0.0, 0.001), Shape(0.0, 10.0), 500) == 1


@given(base_s=times, slope_s=times, shape=shapes, b=batches)
def test_the_pace_keeps_exactly_b_in_flight(base_s: float, slope_s: float, shape: Shape, b: int) -> None:
    """Little's law: lambda S = b. A pace above it builds a queue in the replica, one below lets it idle."""
    mode = serving_mode(line(base_s, slope_s), shape, [], b)
    assert mode.b == b
    assert mode.service_s == service_s(line(base_s, slope_s), shape, b)
    assert mode.rate is not None
    assert math.isclose(mode.rate * mode.service_s, b)


def test_without_a_fit_the_engines_own_limit_is_the_mode() -> None:
    """A pace invented from nothing."""
    assert serving_mode(None, Shape(), [Slo("s", e2e_s=0.001)], 8) == Mode(8)
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


def test_goodput_counts_tokens_so_long_answers_weigh_more() -> None:
    """A batch so large that only the short eight in ten are in time, with a sixth of the tokens."""
    shape = Shape(0.02, 48, (10.0,) * 8 + (200.0,) * 2)
    assert serving_mode(lambda b: 0.01, shape, [Slo("s", e2e_s=3.75)], 64).b == 12
