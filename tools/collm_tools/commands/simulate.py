"""`collm simulate`: a cell of any size in virtual time, under the live policies or their rivals."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from collm_common.errors import CollmError, DataError
from collm_tools.commands import load
from collm_tools.commands.types import Subcommands, at_least_one, positive

if TYPE_CHECKING:
    from collm_tools.simulator.tally import Figures


def add_parser(subcommands: Subcommands) -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "simulate",
        help="the same policies on simulated replicas: any scale, in virtual time",
        description="Offer a trace or synthetic arrivals to simulated replicas whose times were measured on a GPU.",
    )
    group = parser.add_argument_group("the cell")
    group.add_argument("--policy", default="collm", help="who decides (default %(default)s); 'all' compares them")
    group.add_argument("--replicas", type=at_least_one, default=16, metavar="N", help="default %(default)d")
    group.add_argument("--max-batch", type=at_least_one, default=64, metavar="B", help="most sequences of a replica")
    group.add_argument("--adapters", type=at_least_one, default=8, metavar="N", help="in the mix (default %(default)d)")
    group.add_argument(
        "--slower", type=positive, default=1.0, metavar="X", help="replicas X times slower than measured"
    )
    group.add_argument("--prompt-tokens", type=at_least_one, default=256, help="of synthetic arrivals")
    group.add_argument("--output-tokens", type=at_least_one, default=64, help="of synthetic arrivals")
    load.arrival_options(parser.add_argument_group("when requests arrive"))
    load.slo_options(parser.add_argument_group("objective (all given limits must hold)"))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Play it in virtual time and print what it amounts to."""
    if find_spec("collm_dispatcher") is None:
        raise CollmError("the simulator runs the services' policies: pip install 'collm-tools[simulator]'")
    from collm_tools.simulator import lineup, offers
    from collm_tools.simulator.cell import Cell
    from collm_tools.simulator.hardware import measured
    from collm_tools.simulator.tally import Tally

    if arguments.policy not in (*lineup.NAMES, "all"):
        raise DataError(f"must be one of {', '.join(lineup.NAMES)} or all, is {arguments.policy!r}", field="policy")
    arrivals = offers.filled(load.arrivals(arguments), arguments.prompt_tokens, arguments.output_tokens)
    if not arrivals:
        raise DataError("no request arrives in the given duration", field="duration")
    slo = offers.strict(load.slo_of(arguments))
    hardware = measured(slower=arguments.slower)
    known = lineup.known(hardware, fmean(arrival.output_tokens or 1 for arrival in arrivals))
    found: dict[str, Figures] = {}
    for name in lineup.NAMES if arguments.policy == "all" else (arguments.policy,):
        replicas = lineup.cell(name, arguments.replicas, hardware, arguments.max_batch)
        latency = {replica.id: known for replica in replicas}
        tally = Tally()
        cell = Cell(replicas, lineup.scheduler(name, replicas, latency, arguments.adapters, arguments.seed), tally)
        cell.run(offers.offers(arrivals, slo, arguments.adapters, arguments.seed))
        found[name] = tally.figures(max(arrivals[-1].at_s, arguments.duration or 0.0))
    Console().print(table(found))
    if arguments.json:
        load.write_json(arguments.json, found)
    return 0


def table(found: Mapping[str, Figures]) -> Table:
    """A row a policy."""
    rows = Table(title="simulated")
    for title in (
        "policy",
        "offered",
        "completed",
        "inside the SLO",
        "goodput, tokens/s",
        "mean TTFT, ms",
        "mean e2e, ms",
    ):
        rows.add_column(title)
    for name, figures in found.items():
        rows.add_row(
            name,
            str(figures.offered),
            str(figures.completed),
            f"{figures.attainment:.1%}",
            f"{figures.goodput:.1f}",
            f"{1000 * figures.mean_ttft_s:.0f}",
            f"{1000 * figures.mean_e2e_s:.0f}",
        )
    return rows
