"""How few measurements tell the law of interference: the probing plan on a measured grid of (SM share, B, b).

The plan sees a point only after it asked for it; the fit is then judged on the whole grid. R2 is given over all
points, and over those whose window was steady (p95 at most STEADY times the median). Beside it: the plain bivariate
line through all points, and as many points at random. With --check it fails below what is asked of the coordinator.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from msgspec import Struct

from collm_common.latency import Line
from collm_coordinator.latency_fit import fit
from collm_coordinator.probing import MAX_PROBES, next_probe
from collm_coordinator.samples import Point

GRID = Path(__file__).parent / "results" / "beside_h200.csv"
STEADY = 1.6
DRAWS = 40
TURNS = "by turns"
WANTED = {TURNS: 0.85}
WANTED_MPS = 0.95


class Measured(Struct, frozen=True):
    """Median decode iteration of one cell; `steady`: its window was not a mixture of two regimes."""

    point: Point
    steady: bool


def read(path: Path, context: int) -> dict[str, list[Measured]]:
    """Cells with training beside at one context, by SM share, from what `bench/beside.py` writes."""
    grids: dict[str, list[Measured]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            train = int(row["train_batch"])
            if not train or int(row["context"]) != context:
                continue
            p50_ms, p95_ms = float(row["step_median_ms"]), float(row["step_p95_ms"])
            point = Point(train, int(row["sequences"]), p50_ms / 1e3)
            grids.setdefault(row["sm_share"] or TURNS, []).append(Measured(point, p95_ms <= STEADY * p50_ms))
    return grids


def planned(points: Sequence[Point]) -> list[Point]:
    """What the plan asks for, in its order."""
    cells = {(point.train, point.infer): point for point in points}
    trains, infers = [train for train, _ in cells], [infer for _, infer in cells]
    chosen: list[Point] = []
    while (probe := next_probe(chosen, trains, infers)) is not None:
        chosen.append(cells[probe.sizes.train, probe.sizes.infer])
    return chosen


def r2(line: Line, points: Sequence[Point]) -> float:
    """Of a line, over `points`."""
    return _r2([point.seconds for point in points], [line.predict(point.train, point.infer) for point in points])


def bivariate_r2(points: Sequence[Point]) -> float:
    """Of T = a B + b b + c by least squares through all `points`."""
    matrix = np.array([[1.0, point.train, point.infer] for point in points])
    seconds = np.array([point.seconds for point in points])
    coefficients = np.linalg.lstsq(matrix, seconds, rcond=None)[0]
    return _r2(seconds.tolist(), (matrix @ coefficients).tolist())


def _r2(seconds: Sequence[float], predicted: Sequence[float]) -> float:
    mean = statistics.fmean(seconds)
    missed = sum((value - guess) ** 2 for value, guess in zip(seconds, predicted, strict=True))
    return 1 - missed / sum((value - mean) ** 2 for value in seconds)


def drawn_r2(points: Sequence[Point], judged: Sequence[Point], count: int) -> float:
    """Median over DRAWS fits through `count` random points; a refused fit counts as 0."""
    draw = random.Random(0)
    lines = [fit(draw.sample(list(points), count)) for _ in range(DRAWS)]
    return statistics.median(r2(line, judged) if isinstance(line, Line) else 0.0 for line in lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("grid", type=Path, nargs="?", default=GRID, help="CSV of bench/beside.py (default: on an H200)")
    parser.add_argument("--context", type=int, default=320, help="tokens; the grid has 320 and 2000")
    parser.add_argument("--check", action="store_true", help="fail below the wanted R2")
    arguments = parser.parse_args()
    print(f"{'SM share':>10} {'probes':>6} {'R2 all':>7} {'R2 steady':>9} {'plain':>6} {'random':>6} f(B), where")
    missed = []
    for share, measured in read(arguments.grid, arguments.context).items():
        points = [cell.point for cell in measured]
        steady = [cell.point for cell in measured if cell.steady]
        chosen = planned(points)
        line = fit(chosen)
        if not isinstance(line, Line):
            sys.exit(f"{share}: {line.reason}")
        whole, good = r2(line, points), r2(line, steady)
        where = " ".join(f"({point.train},{point.infer})" for point in chosen)
        others = f"{bivariate_r2(points):6.3f} {drawn_r2(points, steady, len(chosen)):6.3f}"
        shape = f"{line.term.name} k={line.term.k:g}" if line.term.k else line.term.name
        print(f"{share:>10} {len(chosen):6d} {whole:7.3f} {good:9.3f} {others} {shape}: {where}")
        if wild := [cell.point for cell in measured if not cell.steady]:
            print(f"{'':>10} unsteady: " + ", ".join(f"({p.train},{p.infer}) {p.seconds * 1e3:.1f} ms" for p in wild))
        if good < WANTED.get(share, WANTED_MPS) or len(chosen) > MAX_PROBES:
            missed.append(share)
    if arguments.check and missed:
        sys.exit(f"below what is wanted: {', '.join(missed)}")


if __name__ == "__main__":
    main()
