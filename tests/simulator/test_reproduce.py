"""The page of results, from days of a few seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from collm_tools.simulator import likeness
from collm_tools.simulator.experiment import COLLM, PEFT, Size, run
from collm_tools.simulator.hardware import measured
from collm_tools.simulator.reproduce import tables
from collm_tools.simulator.workload import DATA, PROFILE, SLICES, day, ideal_rate, level, workload


def test_a_day_follows_the_profile_and_leaves_no_arrival_out() -> None:
    """A load that is thinned, or whose lull is as busy as its peak."""
    load = workload("conv", None)
    arrivals = list(day(load, 200.0, 600.0, seed=1))
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    counts = [0] * SLICES
    for at_s in times:
        counts[int(at_s / 600.0 * SLICES)] += 1
    rates = [count / (600.0 / SLICES) for count in counts]
    top = [rate for n, rate in enumerate(rates) if level(n * 600 / SLICES) == 1.0]
    assert sum(top) / len(top) == pytest.approx(200.0, rel=0.1)
    assert min(share for _, share in PROFILE) < 0.01
    assert level(240) / level(239) == pytest.approx(4.4)


def test_a_likeness_has_the_rates_and_lengths_of_what_it_is_like() -> None:
    """A stand-in whose load is another one."""
    original = workload("code", None).arrivals
    again = likeness.describe(original, "itself")
    known = likeness.read(DATA / "azure_code.json")
    assert sum(again.per_minute) == sum(known.per_minute)
    assert again.prompts[50] == pytest.approx(known.prompts[50], rel=0.1)
    assert again.cv == pytest.approx(known.cv, rel=0.4)


def test_the_ideal_rate_counts_the_prefills_of_the_others() -> None:
    """A capacity of a batch whose members never have to be prefilled: 64 / S(64) would be fifteen times as high."""
    load, hardware = workload("code", None), measured()
    prefill_s = hardware.prefill[0] * load.mean_prompt
    assert 5.0 < ideal_rate(hardware, load, 64) < 1 / prefill_s


def test_a_day_of_each_system_makes_a_row() -> None:
    """A table that mixes up systems, scales or seeds."""
    size = Size(36.0, 4)
    results = [
        run(system, [workload("conv", None)], size, scale, 0) for system in (COLLM, PEFT) for scale in (1.0, 4.0)
    ]
    assert [result.figures.offered for result in results[:2]] == [result.figures.offered for result in results[2:]]
    assert all(len(result.activity) >= SLICES for result in results)
    assert len(tables.of(results, "PEFT", 4.0)) == 1
    rows = tables.simple(results, "system").splitlines()
    assert len(rows) == 2 + len(results)


def test_a_table_is_markdown(tmp_path: Path) -> None:
    """A row of another width than its head."""
    found = tables.table(["a", "b"], [["1", "2"]]).splitlines()
    assert {line.count("|") for line in found} == {3}
