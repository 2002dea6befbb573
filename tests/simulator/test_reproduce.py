"""The page of results, from days of a few seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from collm_tools.cli import USAGE_ERROR, main
from collm_tools.simulator import likeness
from collm_tools.simulator.experiment import COLLM, PEFT, Size, run
from collm_tools.simulator.hardware import measured
from collm_tools.simulator.reproduce import matrix, tables
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


def test_parts_are_run_one_by_one_and_make_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that is run again and throws the others away, or a page that needs them all."""
    monkeypatch.setattr(matrix, "QUICK", Size(36.0, 4))
    days, page = tmp_path / "days", tmp_path / "README.md"
    base = ["reproduce", "--seeds", "1", "--out", str(tmp_path), "--days", str(days), "--only"]
    assert main([*base, "optimum"]) == 0
    assert "exact optimum" in page.read_text()
    assert main([*base, "beside"]) == 0
    assert "exact optimum" in page.read_text()
    assert "separate" in page.read_text()
    saved = matrix.load(days, matrix.QUICK, 1)
    assert saved is not None
    assert {day.system for day in saved.of("beside")} == {system.name for system in matrix.BESIDE}
    assert matrix.load(days, matrix.QUICK, 2) is None


def test_an_unknown_part_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A typing error that costs an hour."""
    assert main(["reproduce", "--out", str(tmp_path), "--only", "cod"]) == USAGE_ERROR
    assert "only" in capsys.readouterr().err


def test_fixed_pairs_are_set_against_the_coordinator_of_their_seed() -> None:
    """A ratio of sums in which one slow seed decides."""
    one = run(PEFT, [workload("conv", None)], Size(36.0, 4), 1.0, 0)
    days = []
    for system in matrix.COORDINATED:
        for seed, later_s in enumerate((20.0, 40.0)):
            reached = [(10.0 if system.name == "coordinator" else later_s, 0.9)]
            days.append(structs.replace(one, system=system.name, seed=seed, reached=reached))
    rows = {row.split("|")[1].strip(): row.split("|") for row in tables.pairs(days).splitlines()[2:]}
    assert rows["coordinator"][5].strip() == "1.00 ± 0.00"
    assert rows["(4, 16)"][5].strip() == "3.00 ± 1.41"


def test_overhead_is_what_the_policies_take_of_the_time_that_replicas_work() -> None:
    """An overhead of the simulator instead, or none at all."""
    result = run(COLLM, [workload("conv", None)], Size(36.0, 4), 2.0, 0)
    worked_s = result.replica_s * (result.inference_share + result.training_share)
    assert 0 < result.policy_s < result.cpu_s
    assert result.overhead == pytest.approx(result.policy_s / worked_s)


def test_a_table_is_markdown(tmp_path: Path) -> None:
    """A row of another width than its head."""
    found = tables.table(["a", "b"], [["1", "2"]]).splitlines()
    assert {line.count("|") for line in found} == {3}
