"""Markdown of simulated days, each figure beside the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from statistics import fmean, stdev

from collm_tools.simulator.experiment import Result
from collm_tools.simulator.optimum import Instance
from collm_tools.simulator.reproduce import paper
from collm_tools.simulator.reproduce.matrix import SCALES, SYSTEMS, Runs
from collm_tools.simulator.workload import DAY_MINUTES, DIP_MINUTES, SLICES, level

TARGET = 1.0
"""Joint completion time is until the published adapter's mean cross-entropy is this low."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n"


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation."""
    if not values:
        return "-"
    around = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{fmean(values):.{digits}f}{around}"


def of(results: Sequence[Result], system: str, scale: float) -> list[Result]:
    """By seed."""
    return [result for result in results if result.system == system and result.scale == scale]


def ratios(results: Sequence[Result], over: str, scale: float, field: str) -> list[float]:
    """CoLLM's figure over another system's, seed by seed."""
    pairs = zip(of(results, "CoLLM", scale), of(results, over, scale), strict=True)
    return [getattr(ours.figures, field) / max(1e-9, getattr(theirs.figures, field)) for ours, theirs in pairs]


def figures(results: Sequence[Result], field: str, digits: int = 0) -> str:
    """A row a system, a column a scale."""
    rows = [
        [
            system.name,
            *(spread([getattr(r.figures, field) for r in of(results, system.name, s)], digits) for s in SCALES),
        ]
        for system in SYSTEMS
    ]
    return table(["", *(f"{scale:g}x" for scale in SCALES)], rows)


def goodput(results: Sequence[Result], name: str) -> str:
    """CoLLM's goodput over each rival's at every scale, the paper's at 4x."""
    rows = [
        [
            system.name,
            *(spread(ratios(results, system.name, scale, "goodput")) for scale in SCALES),
            f"{paper.GOODPUT_AT_4X[name][system.name]:.2f}",
        ]
        for system in SYSTEMS[1:]
    ]
    return table(["CoLLM over", *(f"{scale:g}x" for scale in SCALES), "paper, 4x"], rows)


def q_goodput(results: Sequence[Result]) -> str:
    """CoLLM's Q-goodput over PEFT's."""
    ours = [spread(ratios(results, "PEFT", scale, "q_goodput")) for scale in SCALES]
    theirs = [f"{paper.Q_GOODPUT_OVER_PEFT[s]:.2f}" if s in paper.Q_GOODPUT_OVER_PEFT else "" for s in SCALES]
    return table(["", *(f"{s:g}x" for s in SCALES)], [["CoLLM over PEFT", *ours], ["paper, up to", *theirs]])


def dip_bins() -> list[int]:
    """Bins of the dip, but for the lull in it."""
    minutes = [DAY_MINUTES * index / SLICES for index in range(SLICES)]
    return [n for n, m in enumerate(minutes) if DIP_MINUTES[0] <= m < DIP_MINUTES[1] and level(m) > 0.01]


def utilisation(results: Sequence[Result]) -> str:
    """SM activity and memory at 3x, over the day and in the dip."""
    rows = []
    for system in SYSTEMS:
        found = of(results, system.name, 3.0)
        dips = [100 * fmean(result.activity[index] for index in dip_bins()) for result in found]
        whole = [100 * fmean(result.activity[:SLICES]) for result in found]
        memory = [100 * fmean(result.memory[:SLICES]) for result in found]
        said = paper.DIP_ACTIVITY.get(system.name, paper.DIP_ACTIVITY["baselines"])
        rows.append([system.name, spread(whole, 0), spread(dips, 0), said, spread(memory, 0)])
    return table(["", "day, %", "dip, %", "paper, dip", "memory, %"], rows)


def shares(results: Sequence[Result]) -> str:
    """How CoLLM's replicas spend their time; the two overlap. Overhead is over the time in which they work."""
    rows = []
    for scale in SCALES:
        found = of(results, "CoLLM", scale)
        serving = [100 * result.inference_share for result in found]
        training = [100 * result.training_share for result in found]
        overhead = [100 * result.overhead for result in found]
        rows.append(
            [
                f"{scale:g}x",
                spread(serving, 0),
                spread(training, 0),
                paper.TRAINING_SHARE.get(scale, ""),
                f"{spread(overhead, 3)}, at most {max(overhead):.3f}",
                paper.OVERHEAD,
            ]
        )
    return table(["", "inference, %", "fine-tuning, %", "paper", "overhead, %", "paper"], rows)


def beside(results: Sequence[Result]) -> str:
    """Training beside serving, five ways."""
    rows = []
    for name in dict.fromkeys(result.system for result in results):
        found = of(results, name, 1.0)
        better = [100 * result.figures.better_than_one for result in found]
        rows.append(
            [
                name,
                spread([100 * result.figures.attainment for result in found], 1),
                spread([result.figures.q_goodput for result in found], 0),
                spread(better, 0),
                paper.BETTER_THAN_ONE.get(name, ""),
            ]
        )
    return table(["", "in time, %", "Q-goodput", "answers better than 1, %", "paper"], rows)


def completion_s(result: Result) -> float:
    """When the target quality was published; infinite if it never was."""
    return next((at_s for at_s, cross_entropy in result.reached if cross_entropy <= TARGET), inf)


def pairs(results: Sequence[Result]) -> str:
    """Fixed batch sizes against the coordinator's, each seed normalised to it."""
    scale = results[0].scale
    base = of(results, "coordinator", scale)
    rows = []
    for name in dict.fromkeys(result.system for result in results):
        found = list(zip(of(results, name, scale), base, strict=True))
        seconds = [completion_s(ours) / completion_s(theirs) for ours, theirs in found]
        reached = [value for value in seconds if value < inf]
        late = f" ({len(reached)} of {len(seconds)} reached it)" if len(reached) < len(seconds) else ""
        rows.append(
            [
                name,
                spread([ours.figures.q_goodput / theirs.figures.q_goodput for ours, theirs in found]),
                spread([100 * ours.figures.attainment for ours, _ in found], 1),
                spread([100 * ours.training_share for ours, _ in found], 0),
                spread(reached) + late,
                paper.COMPLETION.get(name, ""),
            ]
        )
    return table(["(B, b)", "Q-goodput", "in time, %", "fine-tuning, %", "joint completion time", "paper, time"], rows)


def simple(results: Sequence[Result], title: str) -> str:
    """A row a system and scale: what its days came to."""
    rows = []
    for name, scale in dict.fromkeys((result.system, result.scale) for result in results):
        found = of(results, name, scale)
        rows.append(
            [
                name,
                f"{scale:g}x",
                spread([100 * result.figures.attainment for result in found], 1),
                spread([result.figures.goodput for result in found], 0),
                spread([result.figures.q_goodput for result in found], 0),
                spread([100 * result.training_share for result in found], 0),
                spread([result.reached[-1][1] for result in found]),
            ]
        )
    head = [title, "load", "in time, %", "goodput", "Q-goodput", "fine-tuning, %", "cross-entropy at the end"]
    return table(head, rows)


def optimum(runs: Runs) -> str:
    """Online over optimal."""
    rows = []
    for count, found in runs.optimum.items():
        online, most = sum(one.online for one in found), sum(one.optimum for one in found)
        above = sum(one.online > one.optimum for one in found)
        rows.append([str(count), f"{online:g}", f"{most:g}", f"{share_of_optimum(found):.2f}", str(above)])
    return table(["requests", "online", "optimum", "share", "times above it"], rows)


def share_of_optimum(found: Sequence[Instance]) -> float:
    """Of several instances together."""
    return sum(one.online for one in found) / sum(one.optimum for one in found)


def hours(results: Sequence[Result]) -> str:
    """What a long day takes to simulate."""
    rows = [
        [
            f"{day.figures.offered:,}",
            f"{day.cpu_s:.0f} s",
            f"{1e6 * day.cpu_s / day.figures.offered:.0f} us",
            f"{100 * day.policy_s / day.cpu_s:.0f} %",
            f"{100 * day.figures.attainment:.1f} %",
            f"{100 * day.training_share:.0f} %",
            str(day.jobs),
        ]
        for day in results
    ]
    head = ["requests", "CPU", "of it a request", "in the live policies", "in time", "fine-tuning", "jobs"]
    return table(head, rows)


def told(day: Result) -> str:
    """The same in a sentence."""
    return f"ten hours, {day.figures.offered:,} requests: simulated in {day.cpu_s:.0f} s of one core"
