"""The pair (B, b) against brute force, and the shape of goodput."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collm_common.latency import LatencyModel, Line, Term
from collm_common.types import BatchSizes, Slo
from collm_coordinator.goodput import efficiency, goodput, throughput
from collm_coordinator.solver import Choice, Demand, Learning, first_draw, keeps_slo, largest_infer_batch, solve

seconds = st.floats(0, 0.05)
models = st.builds(
    lambda base, per_b, per_train, train: LatencyModel(
        Line(base + 1e-3, per_b, per_train, Term("log2(1+B)")), Line(0.05, 0.001, train + 0.01), 1e-4, 20.0
    ),
    seconds,
    st.floats(0, 0.01),
    seconds,
    seconds,
)
slos = st.builds(
    lambda ttft, tpot, e2e: Slo("s", ttft_s=ttft, tpot_s=tpot, e2e_s=e2e),
    st.none() | st.floats(0.01, 2),
    st.none() | st.floats(0.005, 0.2),
    st.none() | st.floats(0.1, 5),
)
demands = st.builds(Demand, slos, st.floats(0, 500), st.floats(0, 0.5))
learnings = st.builds(Learning, st.integers(1, 4), st.integers(1, 8), st.floats(0, 200))


@given(models, demands, learnings, st.integers(1, 24), st.integers(1, 8))
def test_the_choice_is_the_best_of_all_pairs(
    model: LatencyModel, demand: Demand, learning: Learning, infer_max: int, floor: int
) -> None:
    """A search that misses the optimum, or a pair that breaks the SLO."""
    batches = range(1, 9)
    options: list[tuple[float, int, int]] = []
    for train in batches:
        feasible = [b for b in range(1, infer_max + 1) if keeps_slo(model, BatchSizes(train, b), demand)]
        if feasible:
            micro_s = model.micro_step_s(train, max(feasible))
            assert micro_s is not None
            value = goodput(train, learning.first_batch, learning.accumulation, micro_s, learning.noise_scale)
            options.append((value, max(feasible), train))
    choice = solve(model, batches, infer_max, demand, learning, floor)
    if not options:
        assert choice == Choice(BatchSizes(1, 1), 0.0, feasible=False)
        return
    assert choice.feasible
    assert keeps_slo(model, choice.sizes, demand)
    enough = [option for option in options if option[1] >= floor]
    if enough:
        assert choice.goodput == pytest.approx(max(enough)[0])
        assert choice.sizes.infer >= floor
    else:
        assert choice.sizes.infer == max(option[1] for option in options)


@given(models, demands, st.integers(1, 64))
def test_more_training_never_leaves_more_room_for_requests(model: LatencyModel, demand: Demand, infer_max: int) -> None:
    """b*(B) that grows with interference."""
    room = [largest_infer_batch(model, train, infer_max, demand) for train in range(9)]
    assert room == sorted(room, reverse=True)
    assert all(0 <= b <= infer_max for b in room)


def test_each_limit_of_the_objective_counts() -> None:
    """An SLO of which only one part is kept: with 100 ms a step, 10 tokens and 20 ms a prompt token."""
    model = LatencyModel(Line(0.1, 0.0), Line(1.0), prefill_s_per_token=0.02, output_tokens=10.0)
    for slo, kept in (
        (Slo("s", e2e_s=1.21), True),
        (Slo("s", e2e_s=1.19), False),
        (Slo("s", tpot_s=0.11), True),
        (Slo("s", tpot_s=0.09), False),
        (Slo("s", ttft_s=0.31), True),
        (Slo("s", ttft_s=0.29), False),
    ):
        assert keeps_slo(model, BatchSizes(0, 1), Demand(slo, prompt_tokens=10)) is kept
    assert not keeps_slo(model, BatchSizes(0, 1), Demand(Slo("s", e2e_s=1.3), prompt_tokens=10, queue_s=0.2))


def test_without_a_training_model_nothing_is_claimed() -> None:
    """A goodput made of a duration that was never measured."""
    model = LatencyModel(Line(0.1))
    assert not solve(model, range(1, 5), 8, Demand(Slo("s")), Learning()).feasible


def test_efficiency_falls_with_the_batch_and_less_where_gradients_are_noisy() -> None:
    """Bigger batches that always look better, or a noise scale that does not count."""
    assert efficiency(8, 8, noise_scale=10) == 1.0
    assert efficiency(64, 8, noise_scale=10) < efficiency(16, 8, noise_scale=10) < 1.0
    assert efficiency(64, 8, noise_scale=1000) > efficiency(64, 8, noise_scale=10)
    assert efficiency(8, 8, noise_scale=10, loss_fall=-1.0) == 0.0
    assert throughput(32, 2.0) == 16.0
    assert goodput(4, 4, 8, micro_step_s=0.5, noise_scale=0.0) == 8.0


@given(st.text(max_size=20), st.integers(1, 32), st.integers(1, 64))
def test_the_first_draw_is_small_for_training_and_large_for_requests(seed: str, train_max: int, infer_max: int) -> None:
    """A first round that overloads a replica, or draws that differ after a restart."""
    drawn = first_draw(seed, train_max, infer_max)
    assert drawn == first_draw(seed, train_max, infer_max)
    assert 1 <= drawn.train <= max(1, train_max // 2)
    assert infer_max // 2 <= drawn.infer <= infer_max


def test_replicas_draw_apart() -> None:
    """Clients that all measure the same point, so that no slope can be told."""
    assert len({first_draw(f"job r{n}", 8, 16) for n in range(8)}) > 3
