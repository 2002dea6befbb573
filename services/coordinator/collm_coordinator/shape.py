"""f(B), the shape of the interference of training with serving, chosen by leave-one-out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from collm_common.latency import Term
from collm_coordinator.robust import robust, tame
from collm_coordinator.samples import Point

MAX_LEFT_OUT = 32
NNLS_STEPS = 1000
TERMS = (
    Term("B"),
    Term("log2(1+B)"),
    *(Term("B/(B+k)", k) for k in (1.0, 2.0, 4.0)),
    *(Term("min(B,k)", k) for k in (2.0, 4.0, 8.0)),
)


def choose_term(points: Sequence[Point], tells_infer: bool) -> Term:
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
    kept = np.zeros(len(points), dtype=bool)
    for term in TERMS:
        rows = np.array([_row(term, point, tells_infer) for point in points])
        kept |= tame(seconds, rows @ robust(seconds, rows))
        if kept.all():
            break
    return [point for point, keep in zip(points, kept, strict=True) if keep]


def _row(term: Term, point: Point, tells_infer: bool) -> list[float]:
    return [1.0, term(point.train), *([float(point.infer)] if tells_infer else [])]
