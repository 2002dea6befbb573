"""f(B), the shape of the interference of training with serving, chosen by leave-one-out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from scipy.optimize import nnls

from collm_common.latency import Term
from collm_coordinator.robust import Matrix, resistant, tame, trimmed_error
from collm_coordinator.samples import Point

MAX_LEFT_OUT = 32
NNLS_STEPS = 1000
TERMS = (
    Term("B"),
    Term("log2(1+B)"),
    *(Term("B/(B+k)", k) for k in (1.0, 2.0, 4.0)),
    *(Term("min(B,k)", k) for k in (2.0, 4.0, 8.0)),
)


class Candidate(Struct, frozen=True):
    """A term with its non-negative coefficients (base, f(B), b) and its mean leave-one-out error, seconds."""

    term: Term
    coefficients: tuple[float, ...]
    error_s: float

    def predict(self, train: int, infer: int) -> float:
        """Seconds at (B, b)."""
        row = (1.0, self.term(train), float(infer))
        return sum(value * coefficient for value, coefficient in zip(row, self.coefficients, strict=False))


def choose_term(points: Sequence[Point], tells_infer: bool) -> Term:
    """The f(B) with the least leave-one-out error, by non-negative least squares; ties go to the simplest."""
    tried = candidates(points, tells_infer)
    best = min(candidate.error_s for candidate in tried)
    return next(candidate.term for candidate in tried if candidate.error_s <= best * 1.001 + 1e-12)


def candidates(points: Sequence[Point], tells_infer: bool) -> list[Candidate]:
    """Every f(B), judged on the same points.

    Points that are wild by the f(B) nearest to most have no say: least squares would choose one that bends to them.
    """
    points = _without_wild(points, tells_infer)
    left_out = sorted(points, key=lambda point: (-point.count, point.train, point.infer))[:MAX_LEFT_OUT]
    seconds = np.array([point.seconds for point in points])
    found: list[Candidate] = []
    for term in TERMS:
        rows = _rows(term, points, tells_infer)
        total_s = 0.0
        for point in left_out:
            others = np.array([other is not point for other in points])
            coefficients = _solve(rows[others], seconds[others])
            total_s += abs(float(_rows(term, [point], tells_infer)[0] @ coefficients) - point.seconds)
        found.append(Candidate(term, tuple(_solve(rows, seconds).tolist()), total_s / len(left_out)))
    return found


def _solve(rows: Matrix, seconds: Matrix) -> Matrix:
    coefficients, _ = nnls(rows, seconds, maxiter=NNLS_STEPS)
    return np.asarray(coefficients, dtype=np.float64)


def _without_wild(points: Sequence[Point], tells_infer: bool) -> Sequence[Point]:
    seconds = np.array([point.seconds for point in points])
    fits = []
    for term in TERMS:
        rows = _rows(term, points, tells_infer)
        predicted = rows @ resistant(seconds, rows)
        fits.append((trimmed_error(seconds, predicted), predicted))
    kept = tame(seconds, min(fits, key=lambda fit: fit[0])[1])
    return [point for point, keep in zip(points, kept, strict=True) if keep]


def _rows(term: Term, points: Sequence[Point], tells_infer: bool) -> Matrix:
    infer = [[float(point.infer)] if tells_infer else [] for point in points]
    return np.array([[1.0, term(point.train), *own] for point, own in zip(points, infer, strict=True)])
