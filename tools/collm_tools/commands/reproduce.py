"""`collm reproduce`: simulate the paper's evaluation and write its figures beside the paper's."""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from collm_common.errors import CollmError, DataError
from collm_tools.commands.types import Subcommands, at_least_one


def add_parser(subcommands: Subcommands) -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "reproduce",
        help="tables and pictures of the paper's evaluation, from simulated days",
        description="Simulate CoLLM and its rivals over days of load, and write a page of results.",
    )
    parser.add_argument("--traces", type=Path, metavar="DIR", help="folder with Azure's traces of 2023")
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results/simulator"), metavar="DIR", help="default %(default)s"
    )
    parser.add_argument("--seeds", type=at_least_one, default=5, metavar="N", help="default %(default)d")
    parser.add_argument("--full", action="store_true", help="ten hours and 16 replicas: takes hours")
    parser.add_argument("--only", nargs="+", metavar="PART", help="of these parts; the others are as last time")
    parser.add_argument(
        "--days",
        type=Path,
        default=Path(".cache/reproduce.msgpack"),
        metavar="FILE",
        help="the simulated days, part by part (default %(default)s)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate part by part, and write the page anew after each."""
    if find_spec("collm_dispatcher") is None:
        raise CollmError("the simulator runs the services' policies: pip install 'collm-tools[simulator]'")
    from collm_tools.simulator.reproduce import matrix, report

    console, began = Console(), time.monotonic()
    size = matrix.FULL if arguments.full else matrix.QUICK
    wanted = arguments.only or matrix.PARTS
    for part in wanted:
        if part not in matrix.PARTS:
            raise DataError(f"must be of {', '.join(matrix.PARTS)}, is {part!r}", field="only")
    source = "the traces themselves" if arguments.traces else "likenesses of the traces"
    runs = matrix.load(arguments.days, size, arguments.seeds) if arguments.only else None
    runs = runs or matrix.Runs(size, arguments.seeds, source)
    for part in (part for part in matrix.PARTS if part in wanted):
        with console.status("simulating") as status:
            matrix.simulate(runs, part, arguments.traces, status.update)
        runs.save(arguments.days)
        report.write(runs, arguments.out)
        console.print(f"{part}: after {time.monotonic() - began:.0f} s")
    console.print(f"{arguments.out / 'README.md'} written")
    for line in report.spoken(runs):
        console.print(line)
    return 0
