"""`collm drain`: a replica ends when what it has is answered."""

from __future__ import annotations

import argparse
import asyncio
import time

from redis.asyncio import Redis
from rich.console import Console

from collm_common import messages, streams
from collm_common.clock import checkpoint
from collm_common.errors import SettingsError
from collm_common.keys import Keys
from collm_common.messages import Leave
from collm_common.registry import Registry
from collm_common.types import ReplicaInfo
from collm_tools.commands.at_broker import add_broker, at_broker
from collm_tools.commands.types import Subcommands, positive
from collm_tools.story import say

LOOK_S = 0.2


def add_parser(subcommands: Subcommands) -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "drain",
        help="let a replica answer what it has, take nothing new, and end",
        description="Tell a replica to leave: it takes nothing new, answers what it has within its drain_s, gives the "
        "rest to others, and ends with status 0. Needs a user of the broker that may write to {collm}:control:*.",
    )
    parser.add_argument("replica", help="its id, as `collm status` shows it")
    parser.add_argument("--within", type=positive, default=90.0, metavar="S", help="wait for it (default 90 s)")
    parser.add_argument("--force", action="store_true", help="even if no other replica of its model can answer")
    parser.add_argument("--reason", default="by hand", help="for its log (default %(default)r)")
    add_broker(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 once it has left, 1 if it is still there. Raises SettingsError, or BrokerError when the broker is away."""
    return asyncio.run(drain(arguments))


async def drain(arguments: argparse.Namespace) -> int:
    """As `run`."""
    async with at_broker(arguments) as (redis, keys):
        registry = Registry(redis, keys)
        found = chosen(await registry.replicas(), arguments.replica, arguments.force)
        message = Leave(reason=arguments.reason)
        data = messages.encode(message)
        await streams.append(redis, keys.control(found.id), messages.kind(message), found.id, data)
        return await _wait(redis, keys, registry, found, arguments.within)


def chosen(replicas: dict[str, ReplicaInfo], id_: str, force: bool) -> ReplicaInfo:
    """Raises SettingsError for one that is not there, or that is needed."""
    alive = {other: info for other, info in replicas.items() if info.alive}
    if id_ not in alive:
        raise SettingsError(f"no replica {id_!r} is alive; there are: {', '.join(sorted(alive)) or 'none'}")
    found = alive[id_]
    rest = [info for other, info in alive.items() if other != id_ and info.model == found.model and info.ready]
    if not rest and not force:
        raise SettingsError(f"{id_} is the last one that answers for {found.model}; --force drains it all the same")
    return found


async def _wait(redis: Redis, keys: Keys, registry: Registry, found: ReplicaInfo, within_s: float) -> int:
    """It has left when its entry is gone, or is that of a later life."""
    console, end_s, shown = Console(), time.monotonic() + within_s, -1
    while True:
        now = await registry.replica(found.id)
        if now is None or now.incarnation != found.incarnation:
            say(console, f"{found.id} has left")
            return 0
        left = int(await redis.xlen(keys.subflow(found.id)))
        if left != shown:
            say(console, f"{found.id}: {left} requests to answer")
        shown = left
        if time.monotonic() > end_s:
            say(console, f"{found.id} is still there after {within_s:g} s; its log says why")
            return 1
        await asyncio.sleep(LOOK_S)
        checkpoint()
