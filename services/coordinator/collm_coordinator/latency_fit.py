"""T(B, b) = base + s b + t f(B) from samples, with a base and slopes that are not negative (paper section 5.2).

Rank, range and number of samples are checked before anything is fitted: no fit says of itself that it means nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np
from msgspec import Struct

from collm_common.latency import Line, Term
from collm_coordinator.robust import NEAR, SHORTEST_S, Matrix, best_subset, tame
from collm_coordinator.samples import Point
from collm_coordinator.shape import choose_term

MIN_POINTS = 3
MIN_R2 = 0.2
LONGEST_S = 3600.0
MIN_SPREAD = 0.2


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
    base, slopes = best_subset(seconds - share * known, columns)
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
    term = choose_term(points, tells_infer)
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
    near = tame(seconds, predicted)
    r2 = _r2(seconds[near], predicted[near])
    if r2 < MIN_R2 and np.median(np.abs(seconds / predicted - 1)) > NEAR:
        return Refusal(f"R2 is {r2:.2f}, at least {MIN_R2} is needed")
    return msgspec.structs.replace(line, r2=r2)


def _r2(seconds: Matrix, predicted: Matrix) -> float:
    variation = float(((seconds - seconds.mean()) ** 2).sum())
    return 1 - float(((seconds - predicted) ** 2).sum()) / variation if variation > 0 else 1.0


def _strength(column: Matrix, seconds: Matrix) -> float:
    """How much of the seconds goes with the column: the absolute correlation, rounded so that equals stay equal."""
    scale = float(column.std() * seconds.std())
    shared = float(((column - column.mean()) * (seconds - seconds.mean())).mean())
    return round(abs(shared) / scale, 9) if scale else 0.0


def _collinear(first: Matrix, second: Matrix) -> bool:
    return int(np.linalg.matrix_rank(np.column_stack([np.ones_like(first), first, second]))) < 3
