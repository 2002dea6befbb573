"""`python -m collm_dispatcher [--role all|ingress|dispatch]`: run until SIGTERM or SIGINT, then drain."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import socket
from contextlib import AsyncExitStack
from functools import partial

from collm_common.broker import connection, stop_all
from collm_common.clock import SystemClock
from collm_common.errors import SettingsError
from collm_common.process import serve, stop_on_signals, unless_stopped
from collm_common.settings import load
from collm_common.tracing import tracer
from collm_dispatcher.dispatch import dispatching
from collm_dispatcher.ingress.greeting import greet
from collm_dispatcher.ingress.service import Ingress, ingress
from collm_dispatcher.settings import DispatcherSettings

log = logging.getLogger(__name__)
ROLES = ("all", "ingress", "dispatch")


async def live(settings: DispatcherSettings, role: str) -> None:
    """The chosen roles in one process. Raises what a loop of theirs raised."""
    stop, clock = asyncio.Event(), SystemClock()
    stop_on_signals(stop)
    holder = f"{settings.id or socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(connection(settings.redis_url))
        tasks: list[asyncio.Task[None]] = []
        front: Ingress | None = None
        if role in ("all", "dispatch"):
            tasks += (await stack.enter_async_context(dispatching(settings, redis, holder, clock))).tasks
        if role in ("all", "ingress"):
            spans = tracer("dispatcher", holder, settings.otlp_endpoint)
            front = await unless_stopped(stop, stack.enter_async_context(ingress(settings, redis, clock, spans)))
            if front is None:
                return
            tasks += front.tasks
            log.info("listening on port %d", front.port)
            url = settings.public_url or f"http://localhost:{front.port}"
            greeting = asyncio.create_task(greet(front.routes.any_ready, url, next(iter(settings.models)), clock))
            stack.push_async_callback(stop_all, greeting)
        stopped = asyncio.create_task(stop.wait())
        done, _ = await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if front is not None:
            await front.drain(settings.drain_s)


def read(role: str) -> DispatcherSettings:
    """Raises SettingsError, also where an ingress has nothing to serve."""
    settings = load(DispatcherSettings, "dispatcher")
    if role != "dispatch" and not settings.models:
        raise SettingsError("COLLM_DISPATCHER_MODELS names no model")
    return settings


def main() -> None:
    """Exit status as `serve` says, 2 for wrong arguments too."""
    parser = argparse.ArgumentParser(prog="collm-dispatcher", description=__doc__)
    parser.add_argument("--role", choices=ROLES, default="all", help="what to run in this process (default: all)")
    role = parser.parse_args().role
    serve("dispatcher", partial(read, role), partial(live, role=role))


if __name__ == "__main__":
    main()
