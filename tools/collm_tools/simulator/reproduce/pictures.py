"""Pictures of simulated days. matplotlib is loaded only when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from collm_tools.simulator.experiment import MOST, Result
from collm_tools.simulator.reproduce.matrix import SCALES, SYSTEMS, Runs
from collm_tools.simulator.reproduce.tables import of
from collm_tools.simulator.tally import Tally
from collm_tools.simulator.workload import DAY_MINUTES, DIP_MINUTES, SLICES

MINUTES = [DAY_MINUTES * index / SLICES for index in range(SLICES)]


def draw(runs: Runs, out: Path) -> None:
    """Those of the parts that were run, as PNG files in `out`."""
    if (conv := runs.of("conv")) and (code := runs.of("code")):
        _scales({"code": code, "conv": conv}, out / "scales.png")
        _day(conv, out / "utilisation.png")
        _dispatcher(conv, out / "dispatcher.png")
    if beside := runs.of("beside"):
        _qualities(beside, out / "quality.png")


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * columns, 3.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _scales(sweeps: Mapping[str, Sequence[Result]], path: Path) -> None:
    figure, axes = _figure(2, 2)
    for row, (field, label) in zip(axes, (("goodput", "goodput, tokens/s"), ("q_goodput", "Q-goodput")), strict=True):
        for axis, (name, results) in zip(row, sweeps.items(), strict=True):
            for system in SYSTEMS:
                values = [[getattr(r.figures, field) for r in of(results, system.name, s)] for s in SCALES]
                means, around = [fmean(v) for v in values], [pstdev(v) for v in values]
                axis.errorbar(SCALES, means, around, marker="o", capsize=3, label=system.name)
            axis.set(title=name, xlabel="scale", ylabel=label, xticks=SCALES)
            axis.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def _day(results: Sequence[Result], path: Path) -> None:
    figure, axes = _figure(3, 1)
    activity, memory, combined = axes[:, 0]
    for system in SYSTEMS:
        result = of(results, system.name, 3.0)[0]
        activity.plot(MINUTES, [100 * value for value in result.activity[:SLICES]], label=system.name)
        memory.plot(MINUTES, [100 * value for value in result.memory[:SLICES]], label=system.name)
    activity.axvspan(*DIP_MINUTES, color="grey", alpha=0.2)
    activity.set(ylabel="SM activity, %", ylim=(0, 100))
    memory.set(ylabel="memory, %")
    ours = of(results, "CoLLM", 3.0)[0]
    combined.step(MINUTES, ours.combined[:SLICES], where="post", label="replicas that train")
    combined.set(xlabel="minute of the day", ylabel="CoLLM, replicas")
    for axis in (activity, memory, combined):
        axis.legend(fontsize="small", loc="upper right")
    figure.savefig(path, dpi=100)


def _qualities(results: Sequence[Result], path: Path) -> None:
    figure, axes = _figure(1, 1)
    axis = axes[0, 0]
    for name in dict.fromkeys(result.system for result in results):
        counts: dict[int, int] = {}
        for result in of(results, name, 1.0):
            for step, count in result.qualities.items():
                counts[step] = counts.get(step, 0) + count
        total, seen, xs, ys = sum(counts.values()), 0, [], []
        for step in sorted(counts):
            seen += counts[step]
            xs.append((step + 1) * Tally.QUALITY_STEP)
            ys.append(seen / total)
        axis.plot(xs, ys, label=name)
    axis.axvline(1.0, color="grey", linestyle="--")
    axis.set(xlabel="response quality, 1 / cross-entropy", ylabel="share of answers below", xlim=(0, 3))
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def _dispatcher(results: Sequence[Result], path: Path) -> None:
    """The running batch of one replica, and answers in time over the cell, at 3x."""
    figure, axes = _figure(2, 1)
    batch, good = axes[:, 0]
    for name in ("CoLLM", "PEFT"):
        result = of(results, name, 3.0)[0]
        batch.step(MINUTES, [row[0] for row in result.running[:SLICES]], where="post", label=name)
        good.plot(MINUTES, result.good_per_bin, label=f"{name}, in time")
    good.plot(MINUTES, of(results, "PEFT", 3.0)[0].offered_per_bin, color="black", linewidth=0.7, label="offered")
    batch.axhline(MOST, color="tab:blue", linestyle=":", label="ideal mode, b*")
    batch.set(ylabel="running batch of r0")
    good.set(xlabel="minute of the day", ylabel="requests/s")
    for axis in (batch, good):
        axis.legend(fontsize="small", loc="upper right")
    figure.savefig(path, dpi=100)
