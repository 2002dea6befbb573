"""Fits of T(B, b): right on data whose law is known, honest about what the samples cannot tell, refused when bad."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collm_common.latency import Line, Term
from collm_common.types import BatchSizes
from collm_coordinator.latency_fit import MIN_POINTS, Refusal, fit
from collm_coordinator.samples import MAX_CELLS, Grid, Point

GRID = [(train, infer) for train in (0, 1, 2, 4, 8) for infer in (1, 4, 16, 48)]
# One decode step (ms) of b sequences beside a trainer of batch B at 30 % of the SMs of an H200.
H200 = [(1, 1, 7.5), (1, 64, 9.5), (4, 1, 8.1), (4, 32, 9.0), (4, 64, 9.9), (16, 1, 8.3), (16, 16, 8.8), (16, 64, 10.2)]


def points(line: Line, noise: float = 0.0, seed: int = 0) -> list[Point]:
    draw = random.Random(seed)
    return [Point(t, i, line.predict(t, i) * (1 + draw.gauss(0, noise))) for t, i in GRID]


@pytest.mark.parametrize("term", [Term("B"), Term("log2(1+B)"), Term("B/(B+k)", 2.0), Term("min(B,k)", 4.0)])
def test_a_known_law_is_found_with_its_term(term: Term) -> None:
    """Leave-one-out that always picks the straight line, or coefficients in the wrong columns."""
    truth = Line(0.010, 0.0002, 0.004, term)
    found = fit(points(truth, noise=0.002))
    assert isinstance(found, Line)
    assert found.r2 > 0.99
    assert found.sequence_identified
    assert found.train_identified
    for train, infer in GRID:
        assert found.predict(train, infer) == pytest.approx(truth.predict(train, infer), rel=0.03)


def test_a_perfect_fit_is_not_a_failure() -> None:
    """A robust regression whose scale is zero, and that raises instead of answering."""
    found = fit(points(Line(0.010, 0.0002, 0.004)))
    assert isinstance(found, Line)
    assert found.base_s == pytest.approx(0.010)
    assert found.r2 == pytest.approx(1.0)


def test_outliers_do_not_bend_the_line() -> None:
    """A single stall in a measurement that halves every batch size."""
    truth = Line(0.010, 0.0002, 0.004)
    samples = points(truth, noise=0.01)
    samples[3] = Point(samples[3].train, samples[3].infer, 1.0)
    found = fit([*samples[:3], *samples[4:]])
    bent = fit(samples)
    assert isinstance(found, Line)
    assert isinstance(bent, Line | Refusal)
    if isinstance(bent, Line):
        assert bent.predict(4, 16) == pytest.approx(truth.predict(4, 16), rel=0.25)


def test_measurements_of_a_real_device_are_explained() -> None:
    """Formulas that only fit what they were made of."""
    found = fit([Point(train, infer, ms / 1e3) for train, infer, ms in H200])
    assert isinstance(found, Line)
    assert found.r2 > 0.9
    assert found.predict(16, 64) > found.predict(1, 64) > found.predict(1, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 16), st.integers(1, 64), st.floats(1e-4, 10)), min_size=1, max_size=30))
def test_no_slope_is_negative_and_order_does_not_matter(samples: list[tuple[int, int, float]]) -> None:
    """A model that says more work takes less time, or that changes with the order of telemetry."""
    cells = list({(train, infer): Point(train, infer, seconds) for train, infer, seconds in samples}.values())
    found, again = fit(cells), fit(cells[::-1])
    if isinstance(found, Refusal):
        assert isinstance(again, Refusal)
        return
    assert isinstance(again, Line)
    assert found.per_sequence_s >= 0
    assert found.per_train_s >= 0
    assert math.isfinite(found.base_s)
    assert again.predict(2, 8) == pytest.approx(found.predict(2, 8), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("count", range(MIN_POINTS))
def test_too_few_points_are_refused(count: int) -> None:
    """A line through one point."""
    refusal = fit(points(Line(0.01))[:count])
    assert isinstance(refusal, Refusal)
    assert f"{count} of at least {MIN_POINTS}" in refusal.reason


def test_a_slope_that_was_not_measured_is_the_prior_and_says_so() -> None:
    """A replica at one batch size whose model claims that the batch size is free."""
    prior = Line(0.02, 0.0005, 0.003, Term("log2(1+B)"))
    serving = fit([Point(0, infer, 0.010 + 0.0002 * infer) for infer in (1, 4, 16)], prior)
    assert isinstance(serving, Line)
    assert (serving.sequence_identified, serving.train_identified) == (True, False)
    assert (serving.per_train_s, serving.term) == (0.003, Term("log2(1+B)"))
    assert serving.per_sequence_s == pytest.approx(0.0002)
    busy = fit([Point(train, 8, prior.predict(train, 8) + 0.001) for train in (1, 2, 4)], prior)
    assert isinstance(busy, Line)
    assert (busy.sequence_identified, busy.per_sequence_s) == (False, 0.0005)


def test_collinear_samples_do_not_split_one_effect_in_two() -> None:
    """B and b that always changed together, and slopes made up for each."""
    found = fit([Point(n, n, 0.01 + 0.001 * n) for n in (1, 2, 3, 5)])
    assert isinstance(found, Line)
    assert not (found.sequence_identified and found.train_identified and found.term == Term("B"))


def test_noise_without_a_law_is_refused() -> None:
    """Batch sizes chosen by a model that explains nothing."""
    draw = random.Random(1)
    refusal = fit([Point(train, infer, draw.choice([0.01, 1.0])) for train, infer in GRID])
    assert isinstance(refusal, Refusal)
    assert "R2" in refusal.reason


def test_a_steady_duration_is_a_fit_though_nothing_varies() -> None:
    """A device whose time does not depend on the batch, refused for an R2 of zero."""
    found = fit([Point(0, infer, 0.010 + 1e-5 * (infer % 3)) for infer in (1, 4, 16, 48)])
    assert isinstance(found, Line)
    assert found.predict(0, 32) == pytest.approx(0.010, rel=0.05)


def test_the_grid_keeps_rare_cells_and_is_bounded() -> None:
    """Steady traffic at one point that washes out all others, or memory that grows with uptime."""
    grid = Grid()
    grid.add(BatchSizes(4, 2), 0.5)
    for _ in range(10_000):
        grid.add(BatchSizes(0, 8), 0.1, count=50)
    assert {(p.train, p.infer): p.seconds for p in grid.points()} == {(4, 2): 0.5, (0, 8): pytest.approx(0.1)}
    for infer in range(1, 2 * MAX_CELLS):
        grid.add(BatchSizes(1, infer), 0.1)
    assert len(grid.cells) == MAX_CELLS
    assert grid.points(lambda sizes: sizes.train == 0) == []


def test_a_cell_follows_what_changes() -> None:
    """A drift that an average over all time never shows."""
    grid = Grid()
    for _ in range(100):
        grid.add(BatchSizes(0, 1), 1.0, count=10)
    for _ in range(60):
        grid.add(BatchSizes(0, 1), 2.0, count=10)
    assert grid.points()[0].seconds == pytest.approx(2.0, rel=0.01)
