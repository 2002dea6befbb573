"""Straight lines through points of which some are wild: robust least squares without negative coefficients.

RLM (Huber) fails on a single point and on a perfect fit; plain least squares stands in where residuals vanish.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import numpy as np
import statsmodels.api as sm
from numpy.typing import NDArray

NEAR = 0.05
WILD = 6.0
MIN_TAME = 0.75
SHORTEST_S = 1e-9

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
    plain: Matrix = np.asarray(np.linalg.lstsq(matrix, seconds, rcond=None)[0], dtype=np.float64)
    residual = np.abs(seconds - matrix @ plain)
    if len(seconds) <= matrix.shape[1] + 1 or np.median(residual) <= 1e-6 * np.abs(seconds).max():
        return plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted: Matrix = np.asarray(sm.RLM(seconds, matrix, M=sm.robust.norms.HuberT()).fit().params)
    return fitted if np.isfinite(fitted).all() else plain


def tame(seconds: Matrix, predicted: Matrix) -> NDArray[np.bool_]:
    """Which points are about as near to a robust fit as most are; at least MIN_TAME of them."""
    off = np.abs(seconds - predicted) / np.maximum(predicted, SHORTEST_S)
    return np.asarray(off <= max(NEAR, WILD * float(np.median(off)), float(np.quantile(off, MIN_TAME))))
