"""The fitted latency models beside what was measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from collm_common.latency import LatencyModel, Line
from collm_common.messages import InferenceReport
from collm_common.types import BatchSizes
from collm_dispatcher.ingress.page.view import Curve, FitView, Measured

LINES = 3


def measured(reports: Iterable[InferenceReport]) -> dict[str, list[Measured]]:
    """For each replica the count-weighted mean of every (B, b) that ran."""
    sums: dict[str, dict[tuple[int, int], tuple[float, int]]] = defaultdict(dict)
    for report in reports:
        for seen in report.iterations:
            cell, sizes = sums[report.replica], _pair(seen.sizes)
            seconds, count = cell.get(sizes, (0.0, 0))
            cell[sizes] = (seconds + seen.mean_s * seen.count, count + seen.count)
    return {
        replica: [Measured(*sizes, seconds / count, count) for sizes, (seconds, count) in sorted(cells.items())]
        for replica, cells in sums.items()
    }


def fit(replica: str, model: LatencyModel | None, points: list[Measured], limit_max: int) -> FitView:
    """Lines for the training batches that were measured most."""
    if model is None:
        return FitView(replica, points, {}, None, None, sure=False)
    counts: dict[int, int] = defaultdict(int)
    for point in points:
        counts[point.train] += point.count
    often = sorted(counts, key=lambda train: -counts[train])[:LINES]
    lines = {train: _line(model, train, limit_max) for train in sorted(often or [0])}
    used = [_used(model, train) for train in lines]
    sure = all(line.sequence_identified and (line.train_identified or not train) for train, line in used)
    return FitView(replica, points, lines, _error(model, points), min(line.r2 for _, line in used), sure)


def _pair(sizes: BatchSizes) -> tuple[int, int]:
    return sizes.train, sizes.infer


def _line(model: LatencyModel, train: int, limit_max: int) -> Curve:
    return [(float(infer), model.iteration_s(train, infer)) for infer in sorted({1, limit_max})]


def _used(model: LatencyModel, train: int) -> tuple[int, Line]:
    return train, model.infer if train or model.alone is None else model.alone


def _error(model: LatencyModel, points: list[Measured]) -> float | None:
    count = sum(point.count for point in points)
    off = (abs(model.iteration_s(p.train, p.infer) - p.seconds) / p.seconds * p.count for p in points)
    return sum(off) / count if count else None
