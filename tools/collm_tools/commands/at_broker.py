"""What every command that looks into a cell needs: which broker, which cell."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis

from collm_common.broker import AWAY, connection
from collm_common.errors import BrokerError
from collm_common.keys import Keys
from collm_common.settings import Common


def add_broker(parser: argparse.ArgumentParser) -> None:
    """Declare --redis and --key-prefix; without them, the services' own variables say which."""
    common = Common()
    for option, variable, default, what in (
        ("--redis", "COLLM_REDIS_URL", common.redis_url, "URL of the broker"),
        ("--key-prefix", "COLLM_KEY_PREFIX", common.key_prefix, "of the cell's keys"),
    ):
        help_ = f"{what} (default ${variable}, else {default})"
        parser.add_argument(option, default=os.environ.get(variable, default), help=help_)


@asynccontextmanager
async def at_broker(arguments: argparse.Namespace) -> AsyncIterator[tuple[Redis, Keys]]:
    """A client and the cell's keys. Raises BrokerError when the broker is away, SettingsError for a wrong URL."""
    try:
        async with connection(arguments.redis) as redis:
            yield redis, Keys(arguments.key_prefix)
    except AWAY as error:
        raise BrokerError(f"no broker at {arguments.redis} (--redis names another): {error}") from error
