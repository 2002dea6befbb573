"""A service as a process: settings in, signals heard, one exit status out."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from collm_common import logs
from collm_common.broker import stop_all
from collm_common.errors import CollmError
from collm_common.settings import Common, described

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Common)
T = TypeVar("T")


def stop_on_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT set `stop`, from now on."""
    for wanted in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(wanted, stop.set)


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What `work` returns; None, with `work` cancelled, if `stop` is set first."""
    tasks = (asyncio.create_task(work), asyncio.create_task(stop.wait()))
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return await tasks[0] if tasks[0].done() else None
    finally:
        await stop_all(*tasks)


def no_arguments(service: str, settings: type[Common]) -> None:
    """A service is told by its environment; `--help` lists what it reads. Ends the process for any argument."""
    parser = argparse.ArgumentParser(
        prog=f"python -m collm_{service}",
        description="It takes no arguments; these variables set it, lists and mappings as JSON:",
        epilog=described(settings, service),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()


def serve(
    service: str,
    read: Callable[[], S],
    live: Callable[[S], Coroutine[Any, Any, None]],
    title: Callable[[S], str] | None = None,
) -> None:
    """Read the settings and live by them; `title` names the process in its log lines.

    Exit status 2 for wrong settings, 1 when the service cannot go on: one clear line either way.
    """
    try:
        settings = read()
    except CollmError as error:
        print(f"collm-{service}: {error}", file=sys.stderr)
        sys.exit(2)
    logs.setup(title(settings) if title else service, settings.log_level, settings.log_json)
    try:
        uvloop.run(live(settings))
    except CollmError as error:
        log.error("%s", error)
        sys.exit(1)
