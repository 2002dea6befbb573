"""Straight lines through points of which some are wild: robust least squares without negative coefficients.

Huber's loss bounds what a wild point pulls but does not remove it, so it only makes two starts, of absolute and of
relative errors: concentration steps (as in FAST-LTS, Rousseeuw and Van Driessen 1999) fit the points that lie nearest
until these stay the same ones. The last fit takes in all that are not wild by the better of the two.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import numpy as np
import statsmodels.api as sm
from numpy.typing import NDArray

NEAR = 0.05
NEVER_WILD = 0.15
WILD = 6.0
MIN_TAME = 0.75
SHORTEST_S = 1e-9
STEPS = 10
START_STEPS, HUBER_STEPS = 5, 30

Matrix = NDArray[np.float64]


def best_subset(seconds: Matrix, columns: Sequence[Matrix]) -> tuple[float, list[float]]:
    """(base, slope of each column): of all subsets of columns, the best fit in which nothing is negative.

    A negative base is a duration of nothing at small batches, which a solver would take for endless throughput.
    """
    best: tuple[float, float, list[float]] | None = None
    for used in itertools.product((True, False), repeat=len(columns)):
        chosen = [column for column, use in zip(columns, used, strict=True) if use]
        matrix = np.column_stack([np.ones_like(seconds), *chosen])
        coefficients = robust(seconds, matrix)
        if coefficients[0] < 0:
            coefficients = np.array([0.0, *(robust(seconds, matrix[:, 1:]) if chosen else ())])
        if (coefficients < 0).any():
            continue
        error = float(np.abs(seconds - matrix @ coefficients).mean()) * (1 + 1e-3 * len(chosen))
        slopes = iter(coefficients[1:])
        spread = [float(next(slopes)) if use else 0.0 for use in used]
        if best is None or error < best[0]:
            best = (error, float(coefficients[0]), spread)
    assert best is not None, "the subset without columns has no slope that could be negative"
    return best[1], best[2]


def robust(seconds: Matrix, matrix: Matrix) -> Matrix:
    """Coefficients of the columns of `matrix` (points, columns)."""
    rough = resistant(seconds, matrix)
    kept = tame(seconds, matrix @ rough)
    return _huber(seconds[kept], matrix[kept]) if _tells(matrix[kept]) else rough


def resistant(seconds: Matrix, matrix: Matrix) -> Matrix:
    """Coefficients that wild points do not move, from the nearest points alone."""
    scale = np.maximum(seconds, SHORTEST_S)
    starts = (
        _huber(seconds, matrix, START_STEPS),
        _huber(seconds / scale, matrix / scale[:, None], START_STEPS),
    )
    ends = [_concentrated(seconds, matrix, start) for start in starts]
    return min(ends, key=lambda coefficients: trimmed_error(seconds, matrix @ coefficients))


def _concentrated(seconds: Matrix, matrix: Matrix, coefficients: Matrix) -> Matrix:
    """Fit the nearest points, until they stay the same."""
    near = nearest(seconds, matrix @ coefficients)
    for _ in range(STEPS):
        if not _tells(matrix[near]):
            break
        coefficients = _plain(seconds[near], matrix[near])
        before, near = near, nearest(seconds, matrix @ coefficients)
        if (before == near).all():
            break
    return coefficients


def trimmed_error(seconds: Matrix, predicted: Matrix) -> float:
    """Sum of the relative errors of the nearest points."""
    return float(_off(seconds, predicted)[nearest(seconds, predicted)].sum())


def _plain(seconds: Matrix, matrix: Matrix) -> Matrix:
    return np.asarray(np.linalg.lstsq(matrix, seconds, rcond=None)[0], dtype=np.float64)


def _tells(matrix: Matrix) -> bool:
    """Whether these points determine the coefficients, with one to spare."""
    points, columns = matrix.shape
    return bool(points > columns and np.linalg.matrix_rank(matrix) == columns)


def _huber(seconds: Matrix, matrix: Matrix, steps: int = HUBER_STEPS) -> Matrix:
    """RLM fails on a single point and on a perfect fit; plain least squares stands in where residuals vanish."""
    plain = _plain(seconds, matrix)
    residual = np.abs(seconds - matrix @ plain)
    if len(seconds) <= matrix.shape[1] + 1 or np.median(residual) <= 1e-6 * np.abs(seconds).max():
        return plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted: Matrix = np.asarray(sm.RLM(seconds, matrix, M=sm.robust.norms.HuberT()).fit(maxiter=steps).params)
    return fitted if np.isfinite(fitted).all() else plain


def nearest(seconds: Matrix, predicted: Matrix) -> NDArray[np.bool_]:
    """The MIN_TAME of all points that are nearest to a fit."""
    off = _off(seconds, predicted)
    return np.asarray(off <= float(np.quantile(off, MIN_TAME, method="higher")))


def tame(seconds: Matrix, predicted: Matrix) -> NDArray[np.bool_]:
    """Which points are about as near to a robust fit as most are; at least MIN_TAME of them.

    A point within NEVER_WILD is what a straight line misses of a curve, not an accident.
    """
    off = _off(seconds, predicted)
    return np.asarray(off <= max(NEVER_WILD, WILD * float(np.median(off)), float(np.quantile(off, MIN_TAME))))


def _off(seconds: Matrix, predicted: Matrix) -> Matrix:
    return np.asarray(np.abs(seconds - predicted) / np.maximum(predicted, SHORTEST_S))
