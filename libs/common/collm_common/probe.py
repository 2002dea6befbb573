"""For health checks: `python -m collm_common.probe http URL | lease NAME [--unless-away]`; status 0 if it is well."""

from __future__ import annotations

import argparse
import asyncio
import sys
import urllib.request

from collm_common.broker import AWAY, connection
from collm_common.errors import CollmError
from collm_common.settings import Common, load
from collm_common.trouble import fault

WITHIN_S = 5.0


class Unwell(CollmError):
    """The probed service does not do its work; the message says why."""


def http(url: str) -> None:
    """Raises Unwell unless the answer has status 200."""
    try:
        with urllib.request.urlopen(url, timeout=WITHIN_S) as answer:
            answer.read()
    except OSError as error:
        raise Unwell(f"{url}: {error}") from error


async def lease(name: str, unless_away: bool = False) -> None:
    """Raises Unwell unless somebody holds it: a service that is stuck does not renew what it holds.

    With `unless_away`, a broker that cannot say is no fault of the service, which a new start would not heal.
    """
    settings = load(Common, "probe")
    try:
        async with asyncio.timeout(WITHIN_S), connection(settings.redis_url) as redis:
            held = await redis.exists(settings.keys.lease(name))
    except (*AWAY, TimeoutError) as error:
        if unless_away:
            return
        why = f"the broker refuses: {kind}" if (kind := fault(error)) else "broker away"
        raise Unwell(f"{why}: {error}") from error
    if not held:
        raise Unwell(f"nobody holds the lease {name}")


def main() -> None:
    """Exit status 1, with the reason, when it is not well."""
    parser = argparse.ArgumentParser(prog="collm_common.probe", description=__doc__)
    parser.add_argument("what", choices=("http", "lease"))
    parser.add_argument("name", help="a URL, or a lease without its prefix")
    parser.add_argument("--unless-away", action="store_true", help="of a lease: well too while the broker is away")
    arguments = parser.parse_args()
    try:
        if arguments.what == "http":
            http(arguments.name)
        else:
            asyncio.run(lease(arguments.name, arguments.unless_away))
    except CollmError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
