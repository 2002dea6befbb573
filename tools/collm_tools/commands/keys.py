"""`collm keys`: who may use a cell whose ingress requires keys."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable

from rich.console import Console
from rich.table import Table

from collm_common.api_keys import SHOWN, ApiKey, ApiKeys
from collm_tools.commands.at_broker import add_broker, at_broker
from collm_tools.commands.types import Subcommands
from collm_tools.story import say

Action = Callable[[ApiKeys, argparse.Namespace], Awaitable[None]]
LIMITS = ("requests_per_minute", "tokens_per_minute", "streams")


def add_parser(subcommands: Subcommands) -> None:
    """Declare the subcommand and its own."""
    parser = subcommands.add_parser("keys", help="create, list and revoke the API keys of clients")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    made = actions.add_parser("create", help="make a key and show it, this once")
    made.add_argument("tenant", help="whose requests its requests are")
    made.add_argument("--train", action="store_true", help="it may upload files, start jobs and give feedback")
    made.add_argument(
        "--operator", action="store_true", help="it may read metrics and the live page, and feed replicas"
    )
    for limit in LIMITS:
        made.add_argument(f"--{limit.replace('_', '-')}", type=int, metavar="N", help="at most (default: no limit)")
    made.add_argument("--slo-class", action="append", default=[], metavar="NAME", help="allow this class only; repeat")
    gone = actions.add_parser("revoke", help="let no request pass with a key any more")
    gone.add_argument("prefix", help="as `collm keys list` shows it")
    shown = actions.add_parser("list", help="every key's beginning, its tenant and its limits")
    for action, run_it in ((made, create), (shown, show), (gone, revoke)):
        add_broker(action)
        action.set_defaults(run=run, act=run_it)


def run(arguments: argparse.Namespace) -> int:
    """Raises SettingsError, or BrokerError when the broker is away."""
    asyncio.run(act(arguments))
    return 0


async def act(arguments: argparse.Namespace) -> None:
    """As `run`."""
    action: Action = arguments.act
    async with at_broker(arguments) as (redis, keys):
        await action(ApiKeys(redis, keys), arguments)


async def create(known: ApiKeys, arguments: argparse.Namespace) -> None:
    """The secret is alone on standard output."""
    limits = {name: getattr(arguments, name) for name in LIMITS}
    classes = tuple(arguments.slo_class)
    secret, made = await known.create(
        arguments.tenant, train=arguments.train, operator=arguments.operator, slo_classes=classes, **limits
    )
    await known.audit("collm keys", made.tenant, f"create {made.prefix}", "200")
    print(secret)


async def revoke(known: ApiKeys, arguments: argparse.Namespace) -> None:
    """By its beginning."""
    gone = await known.revoke(arguments.prefix)
    await known.audit("collm keys", gone.tenant, f"revoke {gone.prefix}", "200")
    say(Console(), f"{gone.prefix} of {gone.tenant} is revoked")


async def show(known: ApiKeys, _: argparse.Namespace) -> None:
    """A table."""
    table = Table()
    for name in ("key", "tenant", "created", "may", "limits", "classes"):
        table.add_column(name, no_wrap=name == "key", min_width=SHOWN if name == "key" else None)
    for key in await known.listing():
        table.add_row(*_cells(key))
    Console().print(table)


def _cells(key: ApiKey) -> tuple[str, ...]:
    made = time.strftime("%Y-%m-%d %H:%M", time.gmtime(key.created_s))
    may = " ".join(name for name in ("train", "operator") if getattr(key, name)) or "ask"
    limits = ", ".join(f"{name} {value}" for name in LIMITS if (value := getattr(key, name)) is not None) or "none"
    return key.prefix, key.tenant, made, may, limits, " ".join(key.slo_classes) or "all"
