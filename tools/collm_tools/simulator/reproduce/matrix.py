"""Which days are simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

import msgspec
from msgspec import Struct, field

from collm_common.types import BatchSizes
from collm_tools.simulator.experiment import COLLM, DLORA, PEFT, SHEPHERD, Result, Size, System, run
from collm_tools.simulator.optimum import Instance, solve
from collm_tools.simulator.workload import workload

QUICK = Size(1200.0, 8)
FULL = Size(36000.0, 16)
MORNING = Size(36000.0, 6, until_s=5400.0)
"""At full speed, for what a shorter day cannot show: a round of fifty steps, probed and fitted as live ones are."""

HOURS = Size(36000.0, 16, copies=4.0)
"""Ten hours under four copies of both traces' hours: how long does one core simulate that?"""

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

Part = Literal["code", "conv", "optimum", "beside", "pairs", "hours", "merged", "learning", "shares"]
PARTS: tuple[Part, ...] = get_args(Part)


class Runs(Struct):
    """`days` by part; "code" and "conv" are the sweeps over scales. The optimum's instances are by their size."""

    size: Size
    seeds: int
    traces: str
    days: dict[str, list[Result]] = field(default_factory=dict)
    optimum: dict[int, list[Instance]] = field(default_factory=dict)

    def of(self, part: Part) -> list[Result]:
        """Its days, if they were run."""
        return self.days.get(part, [])

    def save(self, path: Path) -> None:
        """For `load`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.msgpack.encode(self))


def load(path: Path, size: Size, seeds: int) -> Runs | None:
    """What was saved, if it is of this size and these seeds."""
    try:
        runs = msgspec.msgpack.decode(path.read_bytes(), type=Runs)
    except (FileNotFoundError, msgspec.DecodeError):
        return None
    return runs if (runs.size, runs.seeds) == (size, seeds) else None


def simulate(runs: Runs, part: Part, traces: Path | None, tell: Callable[[str], None]) -> None:
    """One part, into `runs`; `tell` hears of each day."""
    loads = {name: workload(name, traces) for name in ("code", "conv")}

    def days(
        systems: Sequence[System], names: Sequence[str], scales: Sequence[float], seeds: int, size: Size = runs.size
    ) -> list[Result]:
        found = []
        for scale in scales:
            for seed in range(seeds):
                for system in systems:
                    tell(f"{' + '.join(names)}, {scale:g}x, seed {seed}: {system.name}")
                    found.append(run(system, [loads[name] for name in names], size, scale, seed))
        return found

    match part:
        case "code" | "conv":
            runs.days[part] = days(SYSTEMS, (part,), SCALES, runs.seeds)
        case "beside":
            runs.days[part] = days(BESIDE, ("conv",), (1.0,), runs.seeds)
        case "pairs":
            runs.days[part] = days(COORDINATED, ("conv",), (2.0,), runs.seeds, MORNING)
        case "learning":
            runs.days[part] = days(LEARNING, ("conv",), (1.0,), runs.seeds)
        case "shares":
            runs.days[part] = days(SHARES, ("conv",), (3.0,), runs.seeds)
        case "merged":
            runs.days[part] = days(SYSTEMS, ("code", "conv"), (3.0,), runs.seeds)
        case "hours":
            runs.days[part] = days((COLLM,), ("code", "conv"), (4.0,), 1, HOURS)
        case "optimum":
            runs.optimum = {count: [solve(count, seed) for seed in range(runs.seeds)] for count in (4, 6, 8, 10)}
