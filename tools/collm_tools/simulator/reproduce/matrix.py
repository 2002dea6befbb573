"""Which days are simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collm_common.types import BatchSizes
from collm_tools.simulator.experiment import COLLM, DLORA, PEFT, SHEPHERD, Result, Size, System, run
from collm_tools.simulator.optimum import Instance, solve
from collm_tools.simulator.workload import Workload, workload

QUICK = Size(400.0, 6)
FULL = Size(36000.0, 16)
SCALES = (1.0, 2.0, 3.0, 4.0)
SYSTEMS = (COLLM, DLORA, SHEPHERD, PEFT)
PAIRS = ((4, 16), (8, 12), (12, 8), (16, 4))

BESIDE = (
    System("none", "collm"),
    System("separate", "collm", trains=True, pair=BatchSizes(8, 64), apart=True, snapshots=False),
    System("temporal sharing", "collm", trains=True, sharing="timeslice", pair=BatchSizes(8, 64), snapshots=False),
    System("spatial sharing", "collm", trains=True, sharing="100", pair=BatchSizes(8, 64), snapshots=False),
    COLLM,
)
"""Training beside serving, all under CoLLM's dispatcher; the first four know neither snapshots nor the coordinator."""

COORDINATED = (
    *(System(f"({train}, {infer})", "collm", trains=True, pair=BatchSizes(train, infer)) for train, infer in PAIRS),
    System("coordinator", "collm", trains=True),
)
LEARNING = tuple(System(f"x{factor:g}", "collm", trains=True, learning=factor) for factor in (0.25, 1.0, 4.0))
SHARES = tuple(System(f"{share} %", "collm", trains=True, sharing=share) for share in ("30", "60", "100"))


@dataclass
class Runs:
    """`sweep` is by workload; the others are of conversations. The optimum's instances are by their size."""

    size: Size
    seeds: int
    traces: str
    sweep: dict[str, list[Result]] = field(default_factory=dict)
    beside: list[Result] = field(default_factory=list)
    pairs: list[Result] = field(default_factory=list)
    learning: list[Result] = field(default_factory=list)
    shares: list[Result] = field(default_factory=list)
    merged: list[Result] = field(default_factory=list)
    optimum: dict[int, list[Instance]] = field(default_factory=dict)


def simulate(traces: Path | None, size: Size, seeds: int, tell: Callable[[str], None]) -> Runs:
    """Everything; `tell` hears of each day."""
    runs = Runs(size, seeds, "the traces themselves" if traces else "likenesses of the traces")
    loads = {name: workload(name, traces) for name in ("code", "conv")}

    def days(systems: Sequence[System], names: Sequence[str], scales: Sequence[float], count: int) -> list[Result]:
        found = []
        for scale in scales:
            for seed in range(count):
                for system in systems:
                    tell(f"{' + '.join(names)}, {scale:g}x, seed {seed}: {system.name}")
                    found.append(run(system, picked(names), size, scale, seed))
        return found

    def picked(names: Sequence[str]) -> list[Workload]:
        return [loads[name] for name in names]

    for name in loads:
        runs.sweep[name] = days(SYSTEMS, (name,), SCALES, seeds)
    runs.beside = days(BESIDE, ("conv",), (1.0,), 1)
    runs.pairs = days(COORDINATED, ("conv",), (3.0,), 1)
    runs.learning = days(LEARNING, ("conv",), (1.0,), 1)
    runs.shares = days(SHARES, ("conv",), (3.0,), 1)
    runs.merged = days(SYSTEMS, ("code", "conv"), (3.0,), 1)
    runs.optimum = {count: [solve(count, seed) for seed in range(seeds)] for count in (4, 6, 8, 10)}
    return runs
