"""`collm doctor`: can this machine, its GPUs and the broker carry CoLLM, and what to do if not."""

from __future__ import annotations

import argparse
import asyncio
import sys

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from collm_common.errors import BrokerError
from collm_common.settings import Common
from collm_tools.commands.at_broker import add_broker, at_broker
from collm_tools.commands.types import Subcommands
from collm_tools.doctor import broker, gpu, machine
from collm_tools.doctor.finding import Finding, State, note, wrong

STYLES = {State.OK: "green", State.NOTE: "yellow", State.WRONG: "bold red"}


def add_parser(subcommands: Subcommands) -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "doctor",
        help="check machine, GPUs, MPS and broker, and say what to do",
        description="Look at this machine (interpreter, memory, shared memory, limits, versions), its GPUs and MPS, "
        "and the broker with the cell on it. Nothing is changed. Exit status 1 if something would not work.",
    )
    add_broker(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """1 if anything is wrong. Raises SettingsError for a wrong --redis."""
    found = [*machine.look(), *gpu.look(), *asyncio.run(at(arguments))]
    if arguments.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(found), indent=2).decode() + "\n")
    else:
        Console().print(table(found))
    return int(any(finding.state is State.WRONG for finding in found))


async def at(arguments: argparse.Namespace) -> list[Finding]:
    """What is found at the broker; that there is none is wrong only if one was named."""
    try:
        async with at_broker(arguments) as (redis, keys):
            return await broker.look(redis, keys)
    except BrokerError as error:
        if arguments.redis != Common().redis_url:
            return [wrong("broker", str(error), "start it, or look at its address, its port and the user's rights")]
        return [note("broker", str(error), "collm up brings its own")]


def table(found: list[Finding]) -> Table:
    """A line a finding."""
    shown = Table("", "", "found", "what to do", box=None, pad_edge=False)
    for finding in found:
        shown.add_row(
            Text(finding.state, STYLES[finding.state]), Text(finding.what), Text(finding.said), Text(finding.remedy)
        )
    return shown
