"""The solver against brute force, and the goodput that it maximises."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collm_common.latency import LatencyModel, Line, Term
from collm_common.types import BatchSizes, Slo
from collm_coordinator.goodput import efficiency, goodput, throughput
from collm_coordinator.solver import (
    Demand,
    Learning,
    carried,
    first_draw,
    keeps_slo,
    largest_infer_batch,
    solve,
    solve_shares,
)

seconds = st.floats(1e-4, 0.1)
models = st.builds(
    LatencyModel,
    st.builds(Line, seconds, st.floats(0, 1e-2), st.floats(0, 1e-2), st.sampled_from([Term(), Term("min(B,k)", 4)])),
    st.builds(Line, seconds, st.floats(0, 1e-2), seconds),
    st.floats(0, 1e-3),
    st.floats(1, 50),
)
limits = st.none() | st.floats(0.01, 3)
demands = st.builds(
    Demand,
    st.builds(Slo, name=st.just("s"), ttft_s=limits, tpot_s=limits, e2e_s=limits),
    st.floats(0, 100),
    st.floats(0, 1),
)
learnings = st.builds(Learning, st.integers(1, 4), st.integers(1, 8), st.floats(0, 100))


@settings(max_examples=200, deadline=None)
@given(models, st.integers(0, 16), st.integers(1, 40), demands)
def test_the_largest_batch_is_what_trying_all_gives(model: LatencyModel, train: int, most: int, demand: Demand) -> None:
    """A search that is off by one, or that trusts a limit it does not look at."""
    kept = [b for b in range(1, most + 1) if keeps_slo(model, BatchSizes(train, b), demand)]
    assert largest_infer_batch(model, train, most, demand) == max(kept, default=0)


@settings(max_examples=200, deadline=None)
@given(models, demands, learnings, st.integers(1, 24), st.integers(1, 8))
def test_the_choice_is_the_best_of_all_pairs(
    model: LatencyModel, demand: Demand, learning: Learning, most: int, floor: int
) -> None:
    """A pair that breaks the SLO, or one beside which a better one was overlooked."""
    choice = solve(model, range(1, 9), most, demand, learning, floor)
    best = 0.0
    for train in range(1, 9):
        infer = max([b for b in range(1, most + 1) if keeps_slo(model, BatchSizes(train, b), demand)], default=0)
        step_s = model.micro_step_s(train, infer)
        assert step_s is not None
        if infer >= floor:
            value = goodput(train, learning.first_batch, learning.accumulation, step_s, learning.noise_scale)
            best = max(best, value)
    if choice.feasible:
        assert keeps_slo(model, choice.sizes, demand)
        assert choice.goodput >= best
        assert best == 0.0 or choice.sizes.infer >= floor
    else:
        assert choice.sizes == BatchSizes(1, 1)
        assert best == 0.0


@settings(max_examples=50, deadline=None)
@given(models, demands, learnings)
def test_a_tighter_objective_never_allows_a_larger_batch(
    model: LatencyModel, demand: Demand, learning: Learning
) -> None:
    """An objective read with the wrong sign."""
    tight = Demand(demand.slo, demand.prompt_tokens, demand.queue_s + 0.1)
    for train in (0, 4):
        assert largest_infer_batch(model, train, 32, tight) <= largest_infer_batch(model, train, 32, demand)


@settings(max_examples=50, deadline=None)
@given(models, demands)
def test_more_training_never_leaves_more_room_for_requests(model: LatencyModel, demand: Demand) -> None:
    """b*(B) that grows with interference."""
    rooms = [largest_infer_batch(model, train, 32, demand) for train in range(17)]
    assert rooms == sorted(rooms, reverse=True)


def test_every_limit_of_the_objective_binds() -> None:
    """TTFT without prefill and queue, or a TPOT that nobody checks."""
    model = LatencyModel(Line(0.1), Line(0.1), prefill_s_per_token=0.01, output_tokens=10)
    cases = {"e2e_s": 1.0 + 0.2 + 0.3, "tpot_s": 0.1, "ttft_s": 0.3 + 0.2 + 0.1}
    for limit, value in cases.items():
        for slack, kept in ((1.001, True), (0.999, False)):
            slo = msgspec.convert({"name": "s", limit: value * slack}, Slo)
            assert keeps_slo(model, BatchSizes(1, 1), Demand(slo, prompt_tokens=20, queue_s=0.3)) is kept, limit


def test_a_replica_that_never_trained_gets_no_pair() -> None:
    """A goodput made up from a missing model."""
    choice = solve(LatencyModel(Line(0.1)), [1, 2], 8, Demand(Slo(name="s")), Learning())
    assert (choice.sizes, choice.feasible) == (BatchSizes(1, 1), False)


def test_the_share_of_the_load_is_carried_before_anything_is_trained() -> None:
    """A large B that leaves b too small for the requests that come here."""
    model = LatencyModel(Line(0.01, 0.001, 0.02), Line(0.1, per_train_s=0.01), output_tokens=10)
    slo = Slo("s", tpot_s=0.1)
    free = solve(model, range(1, 5), 64, Demand(slo), Learning(noise_scale=1e6))
    assert free.sizes.train == 4
    bound = solve(model, range(1, 5), 64, Demand(slo, rate=1.2 * free.rate), Learning(noise_scale=1e6))
    assert bound.rate >= 1.2 * free.rate
    assert 1 <= bound.sizes.train < 4
    assert bound.rate == pytest.approx(carried(model, bound.sizes, Demand(slo)))
    most = solve(model, range(1, 5), 64, Demand(slo, rate=1e9), Learning(noise_scale=1e6))
    assert most.sizes.train == 1, "where nothing carries it, what carries most"


def test_a_smaller_share_of_the_sms_is_taken_where_the_slo_needs_it() -> None:
    """A trainer at full speed beside requests that it makes late, or one that is held back for nothing."""
    full = LatencyModel(Line(0.01, per_train_s=0.02), Line(0.1, per_train_s=0.05), sm_share=1.0)
    third = LatencyModel(Line(0.01, per_train_s=0.001), Line(0.2, per_train_s=0.1), sm_share=0.3)

    def share(tpot_s: float) -> float:
        demand = Demand(Slo("s", tpot_s=tpot_s))
        return solve_shares([full, third], range(1, 9), 8, demand, Learning(noise_scale=1e6)).sizes.sm_share

    assert share(1.0) == 1.0
    assert share(0.02) == 0.3


def test_a_noisy_gradient_is_worth_a_larger_batch() -> None:
    """The noise scale, read upside down."""
    model = LatencyModel(Line(0.01), Line(0.1, per_train_s=0.01))
    free = Demand(Slo(name="s"))
    quiet, noisy = (solve(model, range(1, 17), 8, free, Learning(1, 8, scale)) for scale in (0.0, 1e4))
    assert quiet.sizes.train == 1
    assert noisy.sizes.train == 16


def test_goodput_is_throughput_times_efficiency_of_the_effective_batch() -> None:
    """Micro-batch and effective batch confused: a factor of the accumulation."""
    assert throughput(32, 0.5) == 64
    assert efficiency(8, 8, 100) == 1
    assert efficiency(32, 8, 0) == pytest.approx(0.25)
    assert efficiency(32, 8, 1e9) == pytest.approx(1, rel=1e-6)
    assert efficiency(32, 8, 10, loss_fall=-1) == 0
    assert goodput(4, 2, 8, 0.1, 16) == pytest.approx(4 / 0.1 * (16 + 16) / (16 + 32))


@settings(max_examples=50)
@given(st.text(), st.integers(1, 16), st.integers(1, 64))
def test_the_first_draw_is_small_for_training_and_large_for_serving(seed: str, train_max: int, infer_max: int) -> None:
    """A first round that overloads a replica, or one that a restarted coordinator draws differently."""
    draw = first_draw(seed, train_max, infer_max)
    assert draw == first_draw(seed, train_max, infer_max)
    assert 1 <= draw.train <= max(1, train_max // 2)
    assert max(1, infer_max // 2) <= draw.infer <= infer_max


def test_replicas_draw_differently() -> None:
    """Equal sizes everywhere, from which no slope can be told."""
    draws = {first_draw(f"job {replica}", 8, 64) for replica in range(8)}
    assert len({draw.train for draw in draws}) > 1
    assert len({draw.infer for draw in draws}) > 1
