"""Where to measure next: few points, none twice, and a law that holds where nothing was measured."""

from __future__ import annotations

import random

import pytest

from collm_common.latency import Line, Term
from collm_coordinator.latency_fit import fit
from collm_coordinator.probing import MAX_PROBES, next_probe
from collm_coordinator.samples import Point

TRAINS, INFERS = (1, 2, 4, 8, 16), (1, 4, 8, 16, 32, 48, 64)


def probe_all(law: Line, noise: float = 0.0, trains: tuple[int, ...] = TRAINS) -> list[Point]:
    draw = random.Random(7)
    points: list[Point] = []
    while (probe := next_probe(points, trains, INFERS)) is not None:
        train, infer = probe.sizes.train, probe.sizes.infer
        points.append(Point(train, infer, law.predict(train, infer) * (1 + draw.uniform(-noise, noise))))
    return points


@pytest.mark.parametrize("term", [Term(), Term("log2(1+B)"), Term("B/(B+k)", 2.0), Term("min(B,k)", 4.0)])
def test_the_plan_tells_every_shape_from_a_dozen_noisy_points(term: Term) -> None:
    """A plan that asks at the ends only: what saturates looks like a straight line."""
    law = Line(7e-3, 3e-5, 8e-3 / term(16), term)
    points = probe_all(law, noise=0.02)
    line = fit(points)
    assert isinstance(line, Line)
    assert len(points) <= MAX_PROBES
    for train in TRAINS:
        for infer in INFERS:
            assert line.predict(train, infer) == pytest.approx(law.predict(train, infer), rel=0.06)


def test_it_asks_for_no_cell_twice_and_starts_where_it_is_cheap() -> None:
    """A plan that never ends, or whose first probe breaks every objective."""
    points = probe_all(Line(1e-2, 1e-4, 1e-3))
    cells = [(point.train, point.infer) for point in points]
    assert cells[0] == (1, 1)
    assert len(cells) == len(set(cells))


def test_a_law_that_is_plain_takes_fewer_points() -> None:
    """Probes that go on though all shapes agree: each costs a round at sizes that nobody would choose."""
    assert len(probe_all(Line(1e-2, 1e-4, 1e-3))) < MAX_PROBES


def test_a_grid_that_is_measured_whole_is_left() -> None:
    """A probe outside of what may be asked for."""
    assert len(probe_all(Line(1e-2, 1e-4, 1e-3), trains=(1,))) == len(INFERS)
    assert next_probe([Point(1, 1, 0.01)], [1], [1]) is None
