"""Arrival processes and trace parsers."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collm_common.errors import DataError
from collm_tools.load import traces, traffic
from collm_tools.load.traffic import Arrival

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def gaps(arrivals: list[Arrival]) -> list[float]:
    times = [arrival.at_s for arrival in arrivals]
    return [later - earlier for earlier, later in pairwise(times)]


@settings(max_examples=15, deadline=None)
@given(rate=st.floats(0.5, 50), cv=st.floats(0.3, 2.5), seed=st.integers(0, 10**6))
def test_gamma_arrivals_have_the_wanted_rate_and_variation(rate: float, cv: float, seed: int) -> None:
    """Catches shape and scale mixed up: the rate would still be right, the burstiness not."""
    found = gaps(traffic.gamma(rate, cv, 4000 / rate, seed))
    mean = statistics.fmean(found)
    assert mean * rate == pytest.approx(1, abs=6 * cv / 4000**0.5)
    assert statistics.pstdev(found) / mean == pytest.approx(cv, rel=0.35)


@given(rate=st.floats(0.1, 20), factor=st.floats(0.1, 10), seed=st.integers(0, 1000))
def test_scaling_keeps_every_arrival_and_its_order(rate: float, factor: float, seed: int) -> None:
    """Catches scaling by thinning, which makes bursty traffic look smooth."""
    arrivals = traffic.poisson(rate, 30, seed)
    scaled = traffic.scale(arrivals, factor)
    assert len(scaled) == len(arrivals)
    assert [a.at_s * factor for a in scaled] == pytest.approx([a.at_s for a in arrivals])


@given(on_s=st.floats(1, 20), off_s=st.floats(1, 20), seed=st.integers(0, 1000))
def test_on_off_is_silent_in_the_off_windows(on_s: float, off_s: float, seed: int) -> None:
    """Catches windows that drift against each other."""
    arrivals = traffic.on_off(5, on_s, off_s, 100, seed)
    assert all(a.at_s % (on_s + off_s) <= on_s + 1e-6 and a.at_s <= 100 for a in arrivals)
    assert gaps(arrivals) == [gap for gap in gaps(arrivals) if gap >= 0]


def test_phases_follow_one_another() -> None:
    """Catches phases laid over each other."""
    arrivals = traffic.phases([(10, 10), (0, 10), (1, 20)], seed=3)
    counts = [sum(lo <= a.at_s < hi for a in arrivals) for lo, hi in ((0, 10), (10, 20), (20, 40))]
    assert counts[1] == 0
    assert 60 < counts[0] < 140
    assert 5 < counts[2] < 40


def test_the_seed_decides() -> None:
    """Catches arrivals drawn from global randomness."""
    assert traffic.poisson(2, 20, 1) == traffic.poisson(2, 20, 1) != traffic.poisson(2, 20, 2)


@pytest.mark.parametrize(("rate", "cv", "field"), [(0, 1, "rate"), (1, 0, "cv")])
def test_impossible_processes_name_their_field(rate: float, cv: float, field: str) -> None:
    """Catches a division by zero reaching the user."""
    with pytest.raises(DataError, match=field):
        traffic.gamma(rate, cv, 10)


def test_azure_times_start_at_zero_and_ascend(tmp_path: Path) -> None:
    """Catches seven-digit fractions being refused and unsorted rows being played as they are."""
    path = tmp_path / "trace.csv"
    path.write_text(AZURE + "2023-11-16 18:17:04.5319600,3180,8\n2023-11-16 18:17:03.0319600,4808,10\n")
    first, second = traces.read_trace(path)
    assert first == Arrival(0, 4808, 10)
    assert second.at_s == pytest.approx(1.5)
    assert second.prompt_tokens == 3180


def test_mooncake_milliseconds_become_seconds(tmp_path: Path) -> None:
    """Catches a trace played a thousand times too slowly."""
    path = tmp_path / "trace.jsonl"
    rows = (
        {"timestamp": 1000, "input_length": 5, "output_length": 6},
        {"timestamp": 4000, "input_length": 7, "output_length": 8},
    )
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert traces.read_trace(path) == [Arrival(0, 5, 6), Arrival(3, 7, 8)]


@pytest.mark.parametrize(
    ("name", "text", "line", "field"),
    [
        ("a.csv", "when,what\n1,2\n", 1, "header"),
        ("b.csv", AZURE + "2023-11-16 18:17:03,1,1\nyesterday,1,1\n", 3, "TIMESTAMP"),
        ("c.csv", AZURE + "2023-11-16 18:17:03,-4,1\n", 2, "ContextTokens"),
        ("d.csv", AZURE + "2023-11-16 18:17:03,4\n", 2, "GeneratedTokens"),
        ("e.jsonl", '{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp"\n', 2, ""),
        ("f.jsonl", "[1]\n", 1, ""),
        ("g.jsonl", '{"timestamp": "soon", "input_length": 1, "output_length": 1}\n', 1, "timestamp"),
        ("h.jsonl", '{"timestamp": 1, "input_length": 1.5, "output_length": 1}\n', 1, "input_length"),
        ("i.csv", AZURE, 0, "trace"),
        ("j.txt", "", 0, "trace"),
    ],
)
def test_malformed_traces_name_line_and_field(tmp_path: Path, name: str, text: str, line: int, field: str) -> None:
    """Catches "invalid schema" with no place to look at."""
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        traces.read_trace(tmp_path / name)
    assert (caught.value.line, caught.value.field) == (line, field)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    """Catches a traceback for a mistyped path."""
    with pytest.raises(DataError, match="no such file"):
        traces.read_trace(tmp_path / "gone.csv")
