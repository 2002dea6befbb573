"""T(B, b) = base + s b + t f(B) from samples, robust and with slopes that are not negative (paper section 5.2).

RLM (Huber) fails on a single point and on a perfect fit, and only warns on collinear columns: rank, range and number of
samples are checked first, and least squares stands in where residuals vanish. f is chosen by leave-one-out.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np
import statsmodels.api as sm
from msgspec import Struct
from numpy.typing import NDArray
from scipy.optimize import nnls

from collm_common.latency import Line, Term
from collm_coordinator.samples import Point

MIN_POINTS = 3
MIN_R2 = 0.2
NEAR = 0.05
WILD = 6.0
MIN_TAME = 0.75
SHORTEST_S, LONGEST_S = 1e-9, 3600.0
MAX_LEFT_OUT = 32
MIN_SPREAD = 0.2
NNLS_STEPS = 1000
TERMS = (
    Term("B"),
    Term("log2(1+B)"),
    *(Term("B/(B+k)", k) for k in (1.0, 2.0, 4.0)),
    *(Term("min(B,k)", k) for k in (2.0, 4.0, 8.0)),
)

Matrix = NDArray[np.float64]


class Refusal(Struct, frozen=True):
    """Why there is no fit."""

    reason: str


def fit(points: Sequence[Point], prior: Line | None = None) -> Line | Refusal:
    """The best line through `points`, its base and slopes not negative.

    A slope that they cannot tell is the prior's (0 without one), and flagged so; it is scaled down where it alone would
    already explain more seconds than were measured.
    """
    usable = [point for point in points if SHORTEST_S <= point.seconds <= LONGEST_S]
    if len(usable) < MIN_POINTS:
        return Refusal(f"{len(usable)} of at least {MIN_POINTS} different (B, b) were measured")
    seconds = np.array([point.seconds for point in usable])
    infer = np.array([float(point.infer) for point in usable])
    prior = prior or Line(0.0)
    told = _told(usable, seconds, infer, prior)
    train = np.array([told.term(point.train) for point in usable])
    known = (0.0 if told.infer else prior.per_sequence_s) * infer + (0.0 if told.train else prior.per_train_s) * train
    share = _affordable_share(known, seconds)
    columns = [column for column, tells in ((infer, told.infer), (train, told.train)) if tells]
    base, slopes = _best_subset(seconds - share * known, columns)
    line = Line(
        base_s=base,
        per_sequence_s=slopes.pop(0) if told.infer else share * prior.per_sequence_s,
        per_train_s=slopes.pop(0) if told.train else share * prior.per_train_s,
        term=told.term,
        n=len(usable),
        sequence_identified=told.infer,
        train_identified=told.train,
    )
    return _judge(line, usable, seconds)


def proportional(points: Sequence[Point]) -> Line | Refusal:
    """A first guess at the duration of training from too few points for a fit: it grows with B, from nothing."""
    rates = [point.seconds / point.train for point in points if point.train > 0 and point.seconds > 0]
    if not rates:
        return Refusal("nothing was measured")
    return Line(0.0, per_train_s=median(rates), n=len(rates))


class _Told(Struct, frozen=True):
    """Which slopes the points identify, and the f(B) to use."""

    infer: bool
    train: bool
    term: Term


def _told(points: Sequence[Point], seconds: Matrix, infer: Matrix, prior: Line) -> _Told:
    """Range first, then rank and number of points; where these allow one slope only, the stronger one is kept."""
    tells_infer = _spread(infer)
    if not _spread(np.array([float(point.train) for point in points])):
        return _Told(tells_infer, False, prior.term)
    term = _choose_term(points, tells_infer)
    train = np.array([term(point.train) for point in points])
    if not tells_infer or (len(points) > MIN_POINTS and not _collinear(infer, train)):
        return _Told(tells_infer, True, term)
    stronger = _strength(train, seconds) > _strength(infer, seconds)
    return _Told(not stronger, stronger, term if stronger else prior.term)


def _affordable_share(known: Matrix, seconds: Matrix) -> float:
    """At most 1: how much of what the prior explains fits into what was measured."""
    some = known > 0
    return float(np.median(np.minimum(seconds, known)[some] / known[some])) if some.any() else 1.0


def _spread(values: Matrix) -> bool:
    """Whether values differ by more than noise could make up for."""
    return bool(values.max() - values.min() >= max(1.0, MIN_SPREAD * values.max()))


def _judge(line: Line, points: Sequence[Point], seconds: Matrix) -> Line | Refusal:
    """With its R2, wild points aside; refused if it is no duration, or explains little and most points are not near.

    A flat law has an R2 of about 0 however well it fits.
    """
    predicted = np.array([line.predict(point.train, point.infer) for point in points])
    if predicted.min() <= 0:
        return Refusal(f"the fit predicts {predicted.min():.4g} s")
    tame = _tame(seconds, predicted)
    r2 = _r2(seconds[tame], predicted[tame])
    if r2 < MIN_R2 and np.median(np.abs(seconds / predicted - 1)) > NEAR:
        return Refusal(f"R2 is {r2:.2f}, at least {MIN_R2} is needed")
    return msgspec.structs.replace(line, r2=r2)


def _r2(seconds: Matrix, predicted: Matrix) -> float:
    variation = float(((seconds - seconds.mean()) ** 2).sum())
    return 1 - float(((seconds - predicted) ** 2).sum()) / variation if variation > 0 else 1.0


def _tame(seconds: Matrix, predicted: Matrix) -> NDArray[np.bool_]:
    """Which points are about as near to a robust fit as most are; at least MIN_TAME of them."""
    off = np.abs(seconds - predicted) / np.maximum(predicted, SHORTEST_S)
    return np.asarray(off <= max(NEAR, WILD * float(np.median(off)), float(np.quantile(off, MIN_TAME))))


def _choose_term(points: Sequence[Point], tells_infer: bool) -> Term:
    """The f(B) with the least leave-one-out error, by non-negative least squares; ties go to the simplest.

    Points that are wild by every f(B) have no say: least squares would choose the f that bends to them.
    """
    points = _without_wild(points, tells_infer)
    left_out = sorted(points, key=lambda point: (-point.count, point.train, point.infer))[:MAX_LEFT_OUT]
    seconds = np.array([point.seconds for point in points])
    errors: list[float] = []
    for term in TERMS:
        rows = np.array([_row(term, point, tells_infer) for point in points])
        total = 0.0
        for point in left_out:
            others = np.array([other is not point for other in points])
            coefficients, _ = nnls(rows[others], seconds[others], maxiter=NNLS_STEPS)
            total += abs(float(np.array(_row(term, point, tells_infer)) @ coefficients) - point.seconds)
        errors.append(total)
    best = min(errors)
    return next(term for term, error in zip(TERMS, errors, strict=True) if error <= best * 1.001 + 1e-12)


def _without_wild(points: Sequence[Point], tells_infer: bool) -> Sequence[Point]:
    seconds = np.array([point.seconds for point in points])
    tame = np.zeros(len(points), dtype=bool)
    for term in TERMS:
        rows = np.array([_row(term, point, tells_infer) for point in points])
        tame |= _tame(seconds, rows @ _robust(seconds, rows))
        if tame.all():
            break
    return [point for point, keep in zip(points, tame, strict=True) if keep]


def _row(term: Term, point: Point, tells_infer: bool) -> list[float]:
    return [1.0, term(point.train), *([float(point.infer)] if tells_infer else [])]


def _best_subset(seconds: Matrix, columns: Sequence[Matrix]) -> tuple[float, list[float]]:
    """(base, slope of each column): of all subsets of columns, the best fit in which nothing is negative.

    A negative base is a duration of nothing at small batches, which a solver would take for endless throughput.
    """
    best: tuple[float, float, list[float]] | None = None
    for used in itertools.product((True, False), repeat=len(columns)):
        chosen = [column for column, use in zip(columns, used, strict=True) if use]
        matrix = np.column_stack([np.ones_like(seconds), *chosen])
        coefficients = _robust(seconds, matrix)
        if coefficients[0] < 0:
            coefficients = np.array([0.0, *(_robust(seconds, matrix[:, 1:]) if chosen else ())])
        if (coefficients < 0).any():
            continue
        error = float(np.abs(seconds - matrix @ coefficients).mean()) * (1 + 1e-3 * len(chosen))
        slopes = iter(coefficients[1:])
        spread = [float(next(slopes)) if use else 0.0 for use in used]
        if best is None or error < best[0]:
            best = (error, float(coefficients[0]), spread)
    assert best is not None, "the subset without columns has no slope that could be negative"
    return best[1], best[2]


def _robust(seconds: Matrix, matrix: Matrix) -> Matrix:
    plain: Matrix = np.asarray(np.linalg.lstsq(matrix, seconds, rcond=None)[0], dtype=np.float64)
    residual = np.abs(seconds - matrix @ plain)
    if len(seconds) <= matrix.shape[1] + 1 or np.median(residual) <= 1e-6 * np.abs(seconds).max():
        return plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        robust: Matrix = np.asarray(sm.RLM(seconds, matrix, M=sm.robust.norms.HuberT()).fit().params)
    return robust if np.isfinite(robust).all() else plain


def _strength(column: Matrix, seconds: Matrix) -> float:
    """How much of the seconds goes with the column: the absolute correlation, rounded so that equals stay equal."""
    scale = float(column.std() * seconds.std())
    shared = float(((column - column.mean()) * (seconds - seconds.mean())).mean())
    return round(abs(shared) / scale, 9) if scale else 0.0


def _collinear(first: Matrix, second: Matrix) -> bool:
    return int(np.linalg.matrix_rank(np.column_stack([np.ones_like(first), first, second]))) < 3
