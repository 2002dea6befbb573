"""`collm status`: what every replica is doing, live."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys

import msgspec
from rich.console import Console
from rich.live import Live

from collm_common.clock import checkpoint
from collm_tools.commands.at_broker import add_broker, at_broker
from collm_tools.commands.types import Subcommands, positive
from collm_tools.status.snapshot import take
from collm_tools.status.view import render


def add_parser(subcommands: Subcommands) -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "status",
        help="live table of replicas, states, batch sizes, adapters, queues and goodput",
        description="Show replicas, states, batch sizes, adapter versions, queues and serving figures.",
    )
    add_broker(parser)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="HTTP service, for its goodput figures")
    parser.add_argument("--every", type=positive, default=1.0, metavar="S", help="refresh (default %(default)g s)")
    parser.add_argument("--once", action="store_true", help="print the table once")
    parser.add_argument("--json", action="store_true", help="print one snapshot as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Until Ctrl-C, or once. Raises BrokerError when the broker is away."""
    return asyncio.run(watch(arguments))


async def watch(arguments: argparse.Namespace) -> int:
    """As `run`; a cancel ends the live view."""
    console = Console()
    async with at_broker(arguments) as (redis, keys):
        snapshot = await take(redis, keys, arguments.url)
        if arguments.json:
            sys.stdout.write(msgspec.json.format(msgspec.json.encode(snapshot), indent=2).decode() + "\n")
            return 0
        if arguments.once:
            console.print(render(snapshot))
            return 0
        with contextlib.suppress(asyncio.CancelledError), Live(render(snapshot), console=console) as live:
            while True:
                await asyncio.sleep(arguments.every)
                checkpoint()
                live.update(render(await take(redis, keys, arguments.url)))
    return 0
