"""Latency fits: exact where they can be, robust to bad points, honest about what the samples cannot tell."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collm_common.latency import Line, Term
from collm_common.types import BatchSizes
from collm_coordinator.latency_fit import Refusal, fit, proportional
from collm_coordinator.samples import MAX_CELLS, Grid, Point, pooled

GRID = [(train, infer) for train in (0, 1, 2, 4, 8, 16) for infer in (1, 8, 32, 64)]

# Milliseconds of a decode iteration of an 8B model on an H200 beside a trainer without an SM limit; (8, 32) went wrong.
MEASURED = {
    (1, 1): 7.657,
    (1, 16): 8.238,
    (1, 64): 9.464,
    (2, 4): 9.178,
    (2, 32): 8.998,
    (4, 1): 10.379,
    (4, 16): 12.163,
    (4, 64): 14.451,
    (8, 4): 18.057,
    (8, 16): 18.447,
    (8, 32): 7.371,
    (8, 64): 20.126,
    (16, 4): 27.158,
    (16, 16): 28.11,
    (16, 64): 30.2,
}


def sampled(law: Callable[[int, int], float], grid: list[tuple[int, int]]) -> list[Point]:
    return [Point(train, infer, law(train, infer)) for train, infer in grid]


def fitted(points: list[Point], prior: Line | None = None) -> Line:
    line = fit(points, prior)
    assert isinstance(line, Line), line
    return line


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-3, 0.1), st.floats(0, 1e-2), st.floats(0, 1e-2), st.sampled_from([Term(), Term("log2(1+B)")]))
def test_an_exact_law_is_found_again(base: float, sequence: float, train: float, term: Term) -> None:
    """Coefficients that are swapped, scaled, or lost where residuals vanish and a robust fit divides by zero."""
    law = Line(base, sequence, train, term)
    line = fitted(sampled(law.predict, GRID))
    for point in ((0, 1), (3, 16), (16, 64)):
        assert line.predict(*point) == pytest.approx(law.predict(*point), rel=0.02)
    assert line.sequence_identified
    assert line.train_identified
    assert line.r2 > 0.99 or sequence + train < 1e-4


@pytest.mark.parametrize("term", [Term(), Term("log2(1+B)"), Term("B/(B+k)", 2), Term("min(B,k)", 4)])
def test_the_shape_of_the_interference_is_told_from_the_samples(term: Term) -> None:
    """A straight line through an effect that saturates: wrong at every batch that was not tried."""
    law = Line(0.01, 1e-4, 0.02, term)
    line = fitted(sampled(law.predict, GRID))
    assert line.term == term


def test_one_bad_point_of_fifteen_measured_ones_does_not_bend_the_line() -> None:
    """Least squares that an outlier pulls by several milliseconds."""
    points = [Point(train, infer, ms / 1e3) for (train, infer), ms in MEASURED.items()]
    line = fitted(points)
    good = {point: ms for point, ms in MEASURED.items() if point != (8, 32)}
    errors = [abs(line.predict(train, infer) * 1e3 / ms - 1) for (train, infer), ms in good.items()]
    assert sorted(errors)[len(errors) // 2] < 0.07
    assert max(errors) < 0.25


def test_what_samples_cannot_tell_is_the_prior_and_says_so() -> None:
    """A slope of nothing, taken for a measurement, that allows any batch size."""
    prior = Line(0.5, per_sequence_s=0.25, per_train_s=0.125)
    law = Line(1.0, 0.5, 0.0)
    one_train = fitted(sampled(law.predict, [(2, 1), (2, 4), (2, 8)]), prior)
    assert one_train.per_sequence_s == pytest.approx(0.5)
    assert one_train.sequence_identified
    assert (one_train.per_train_s, one_train.train_identified) == (0.125, False)
    assert one_train.predict(2, 4) == pytest.approx(3.0), "it still meets the points"
    law = Line(1.0, 0.0, 0.5)
    one_infer = fitted(sampled(law.predict, [(1, 4), (2, 4), (8, 4)]), prior)
    assert (one_infer.per_sequence_s, one_infer.sequence_identified) == (0.25, False)
    assert one_infer.train_identified
    assert one_infer.predict(8, 4) == pytest.approx(5.0)


def test_batches_that_move_together_tell_one_slope_only() -> None:
    """Collinear columns, of which a fit returns any of endless solutions."""
    line = fitted(sampled(Line(1.0, 0.5, 0.5).predict, [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16)]))
    assert [line.sequence_identified, line.train_identified] == [True, False]
    assert line.predict(4, 4) == pytest.approx(5.0)


def test_as_many_points_as_coefficients_are_not_a_fit() -> None:
    """Three points and three coefficients: R2 of 1, and no meaning."""
    points = [(1, 1), (2, 8), (8, 4)]
    line = fitted(sampled(Line(1.0, 0.5, 0.01).predict, points))
    assert [line.sequence_identified, line.train_identified] == [True, False]
    line = fitted(sampled(Line(1.0, 0.01, 0.5).predict, points))
    assert [line.sequence_identified, line.train_identified] == [False, True], "the one that matters is kept"


def test_neighbouring_batches_do_not_identify_a_slope() -> None:
    """Noise between 15 and 16 sequences that is extrapolated to 64."""
    line = fitted([Point(0, 15, 1.0), Point(0, 16, 1.3), Point(4, 15, 2.0), Point(4, 16, 2.0)])
    assert not line.sequence_identified


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 16), st.integers(1, 64), st.floats(1e-3, 1.0)), min_size=0, max_size=20))
def test_whatever_is_measured_no_slope_is_negative_and_no_duration_either(rows: list[tuple[int, int, float]]) -> None:
    """A model by which more work takes less time, or a crash of the robust fit."""
    points = [Point(*row) for row in {row[:2]: row for row in rows}.values()]
    line = fit(points)
    if isinstance(line, Line):
        assert line.per_sequence_s >= 0
        assert line.per_train_s >= 0
        assert min(line.predict(train, infer) for train, infer, _ in rows) > 0
    else:
        assert line.reason


def test_bad_fits_are_refused_with_the_figure() -> None:
    """Noise that is used as if it were a law, or a single point."""
    assert isinstance(fit([Point(0, 1, 1.0)]), Refusal)
    assert isinstance(fit([Point(0, b, float("nan")) for b in (1, 2, 3)]), Refusal)
    noise = [Point(0, b, 1.0 if b % 2 else 3.0) for b in range(1, 9)]
    refusal = fit(noise)
    assert isinstance(refusal, Refusal)
    assert "R2" in refusal.reason
    constant = fitted([Point(0, b, 0.5) for b in (1, 2, 4, 8)])
    assert constant.predict(0, 64) == pytest.approx(0.5, rel=0.01)


def test_one_wild_point_does_not_refuse_a_line_that_all_others_are_on() -> None:
    """A replica without any model for as long as one bad cell stays in its grid."""
    law = Line(0.01)
    points = [*sampled(law.predict, [(0, b) for b in range(1, 9)]), Point(0, 16, 1.0)]
    assert fitted(points).predict(0, 4) == pytest.approx(0.01, rel=0.05)


def test_a_prior_that_explains_too_much_is_scaled_down() -> None:
    """A slope borrowed from slower replicas, met by a base far below zero: nothing would cost time without training."""
    line = fitted([Point(1, b, 0.1) for b in (1, 2, 4)], Line(0.0, per_train_s=9.0))
    assert line.base_s >= 0
    assert line.predict(1, 4) == pytest.approx(0.1)
    assert not line.train_identified


@pytest.mark.parametrize("power", [1.3, 1.6, 2.0])
def test_time_that_grows_faster_than_the_batch_leaves_no_free_batches(power: float) -> None:
    """A base below zero: a small batch takes no time, and its throughput has no end."""
    line = fitted(
        sampled(lambda train, infer: 0.02 * train**power + 1e-4 * infer, [(b, i) for b in (2, 4, 8) for i in (4, 8)])
    )
    rates = [batch / line.predict(batch, 4) for batch in range(1, 9)]
    assert line.base_s >= 0
    assert max(rates) <= 1 / 0.02


@settings(max_examples=40, deadline=None)
@given(st.floats(5e-3, 0.1), st.floats(1e-4, 1e-2), st.floats(1e-4, 1e-2), st.data())
def test_two_wild_points_do_not_move_the_law(base: float, sequence: float, train: float, data: st.DataObject) -> None:
    """Hiccups of a shared machine that become a model. Wild are at most two of 24, not beside the same B."""
    law = Line(base, sequence, train)
    rows = data.draw(st.sets(st.integers(0, 5), max_size=2))
    wild = {4 * row + data.draw(st.integers(0, 3)) for row in rows}
    factor = data.draw(st.floats(2, 10))
    points = [Point(*cell, law.predict(*cell) * (factor if i in wild else 1)) for i, cell in enumerate(GRID)]
    line = fitted(points)
    errors = sorted(abs(line.predict(*cell) / law.predict(*cell) - 1) for cell in GRID)
    assert errors[-1] < 0.01


@pytest.mark.parametrize("seconds", [0.01, 1e-6, 60.0])
def test_equal_durations_everywhere_are_a_constant(seconds: float) -> None:
    """A solver of least squares that gives up, and ends the service, where nothing is left to explain."""
    cells = [(17, 2), (0, 26), (0, 2), (0, 73), (1, 31), (7, 22), (8, 16), (51, 177), (6, 334), (29, 2), (1, 17)]
    line = fitted([Point(*cell, seconds) for cell in cells])
    assert line.predict(4, 32) == pytest.approx(seconds)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_order_of_the_samples_does_not_matter(data: st.DataObject) -> None:
    """A model that jumps because a cell was measured again."""
    cells = st.tuples(st.integers(0, 8), st.integers(1, 32))
    durations = data.draw(st.dictionaries(cells, st.floats(1e-3, 0.1), min_size=3, max_size=14))
    points = [Point(*cell, seconds) for cell, seconds in durations.items()]
    first, second = fit(points), fit(data.draw(st.permutations(points)))
    assert type(first) is type(second)
    if isinstance(first, Line) and isinstance(second, Line):
        for cell in durations:
            assert first.predict(*cell) == pytest.approx(second.predict(*cell), rel=1e-3)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.tuples(st.integers(0, 64), st.integers(1, 512)), st.floats(min_value=0), max_size=12))
def test_absurd_durations_neither_crash_nor_reach_the_model(durations: dict[tuple[int, int], float]) -> None:
    """One clock that jumped: an R2 that is not a number, which no reader can load."""
    line = fit([Point(*cell, seconds) for cell, seconds in durations.items()])
    if isinstance(line, Line):
        assert all(math.isfinite(value) for value in (line.base_s, line.per_sequence_s, line.per_train_s, line.r2))


def test_a_first_guess_is_proportional_to_the_batch() -> None:
    """No sizes at all in the first rounds because three points are not there yet."""
    guess = proportional([Point(2, 4, 1.0), Point(4, 4, 2.2), Point(4, 8, 1.8), Point(0, 1, 7.0)])
    assert isinstance(guess, Line)
    assert guess.predict(8, 1) == pytest.approx(4.0)
    assert not guess.train_identified
    assert isinstance(proportional([]), Refusal)


def test_a_grid_keeps_rare_cells_beside_steady_traffic_and_is_bounded() -> None:
    """Coverage washed out by a thousand samples at one point, or memory that grows with time."""
    grid = Grid()
    grid.add(BatchSizes(1, 1), 5.0)
    for _ in range(1000):
        grid.add(BatchSizes(0, 4), 1.0, count=10)
    assert {point.seconds for point in grid.points()} == {5.0, 1.0}
    for _ in range(50):
        grid.add(BatchSizes(0, 4), 3.0)
    (moved,) = grid.points(lambda sizes: sizes.train == 0)
    assert 2.9 < moved.seconds <= 3.0
    for infer in range(1, 2 * MAX_CELLS):
        grid.add(BatchSizes(0, infer), 1.0)
    assert len(grid.points()) == MAX_CELLS


def test_replicas_are_pooled_by_how_often_they_measured() -> None:
    """One odd sample that counts as much as a hundred."""
    one, other = Grid(), Grid()
    one.add(BatchSizes(1, 1), 1.0, count=30)
    other.add(BatchSizes(1, 1), 2.0, count=10)
    other.add(BatchSizes(2, 1), 4.0)
    assert pooled([one, other]) == [Point(1, 1, 1.25, 40), Point(2, 1, 4.0, 1)]


def test_a_thousand_degenerate_inputs_give_no_negative_slope_and_nothing_that_is_not_a_number() -> None:
    """One point, one row, collinear batches, clocks that jump, garbage: a model that takes batches as free."""
    draw = random.Random(3)
    for _ in range(1000):
        points = _degenerate(draw)
        line = fit(points, draw.choice([None, Line(0.01, 0.001, 0.002, Term("log2(1+B)"))]))
        if isinstance(line, Line):
            assert min(line.base_s, line.per_sequence_s, line.per_train_s) >= 0, points
            assert math.isfinite(line.r2 + line.base_s + line.per_sequence_s + line.per_train_s), points


def _degenerate(draw: random.Random) -> list[Point]:
    """At most eight points of a kind that a plain regression fails on."""
    same = draw.randint(1, 16)
    shapes: list[Callable[[int], tuple[int, int]]] = [
        lambda i: (same, i + 1),
        lambda i: (i, same),
        lambda i: (i + 1, 4 * (i + 1)),
        lambda i: (i, 8 - i),
        lambda i: (draw.randint(0, 16), draw.randint(1, 64)),
    ]
    slope = draw.uniform(-2, 2)
    laws: list[Callable[[int, int], float]] = [
        lambda train, infer: 0.01,
        lambda train, infer: 1.0 + slope * (train - infer),
        lambda train, infer: 10 ** draw.uniform(-9, 9),
        lambda train, infer: draw.choice([0.0, -1.0, math.nan, math.inf, 0.01]),
        lambda train, infer: (0.01 + 0.001 * infer) * draw.choice([1, 1, 1, 1000]),
    ]
    shape, law = draw.choice(shapes), draw.choice(laws)
    cells = {shape(i) for i in range(draw.randint(0, 8))}
    return [Point(*cell, law(*cell), draw.randint(1, 9)) for cell in sorted(cells)]
