"""`collm adapter`: which versions were served, and back to one of them."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable

from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from collm_common.keys import Keys
from collm_common.lineage import Turn, history, roll_back
from collm_tools.commands.at_broker import add_broker, at_broker
from collm_tools.commands.types import Subcommands
from collm_tools.story import say

Action = Callable[[Redis, Keys, argparse.Namespace], Awaitable[None]]


def add_parser(subcommands: Subcommands) -> None:
    """Declare the subcommand and its own."""
    parser = subcommands.add_parser("adapter", help="history of an adapter, and the way back to an older version")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    shown = actions.add_parser("history", help="every change of the current version, oldest first")
    back = actions.add_parser("rollback", help="make an older version current everywhere; a job that trains it ends")
    back.add_argument("--to", type=_version, metavar="N", help="0 is the base model (default: the one before)")
    back.add_argument("--reason", default="by hand", help="for the history (default %(default)r)")
    for action, run_it in ((shown, show), (back, take_back)):
        action.add_argument("name", help="of the adapter")
        add_broker(action)
        action.set_defaults(run=run, act=run_it)


def run(arguments: argparse.Namespace) -> int:
    """Raises AdapterError, or BrokerError when the broker is away."""
    asyncio.run(act(arguments))
    return 0


async def act(arguments: argparse.Namespace) -> None:
    """As `run`."""
    action: Action = arguments.act
    async with at_broker(arguments) as (redis, keys):
        await action(redis, keys, arguments)


async def show(redis: Redis, keys: Keys, arguments: argparse.Namespace) -> None:
    """Print the history."""
    table = Table("version", "from", "when", "held-out before", "after", "job", "round", "reason")
    for turn in await history(redis, keys, arguments.name):
        table.add_row(*_cells(turn))
    Console().print(table)


async def take_back(redis: Redis, keys: Keys, arguments: argparse.Namespace) -> None:
    """Roll back and say so."""
    turn = await roll_back(redis, keys, arguments.name, arguments.to, arguments.reason, time.time())
    say(Console(), f"{arguments.name}: version {turn.version} is current, after {turn.parent}")


def _cells(turn: Turn) -> list[str]:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(turn.time_s))
    before, after = ("" if loss is None else f"{loss:.4f}" for loss in (turn.before, turn.after))
    return [str(turn.version), str(turn.parent), when, before, after, turn.job, str(turn.round or ""), turn.reason]


def _version(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, is {text!r}")
    return int(text)
