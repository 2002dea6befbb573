"""Requests, replies and a fake engine on the Redis path of one replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_common.messages import Reply, Request
from collm_common.types import SamplingParams, Slo
from collm_replica.adapter_feed import AdapterFeed
from collm_replica.engine.fake import FakeEngine
from collm_replica.inference import engine_config
from collm_replica.serving import Serving
from collm_replica.settings import ReplicaSettings
from collm_replica.telemetry import CpuUtilisation


def settings(**changes: Any) -> ReplicaSettings:
    """One replica `r1` of model `m`."""
    defaults: dict[str, Any] = {"id": "r1", "model": "none", "served_name": "m", "engine": "fake", "report_s": 0.05}
    return ReplicaSettings(**{**defaults, **changes})


def request(id_: str = "q1", **changes: Any) -> Request:
    """Four tokens after a prompt of three."""
    defaults: dict[str, Any] = {
        "id": id_,
        "ingress": "i1",
        "model": "m",
        "prompt": (5, 6, 7),
        "sampling": SamplingParams(max_tokens=4),
        "slo": Slo("s"),
        "arrival_s": 1.0,
        "deadline_s": float("inf"),
    }
    return Request(**{**defaults, **changes})


async def send(redis: Redis, keys: Keys, message: Request) -> None:
    """Into the subflow of `r1`, as the dispatch loop releases it."""
    await streams.append(redis, keys.subflow("r1"), "request", message.id, messages.encode(message))


async def replies(redis: Redis, keys: Keys, ingress: str = "i1") -> list[Reply]:
    """Everything said to one ingress so far."""
    found: list[Reply] = []
    for entry in streams.parse("", await redis.xrange(keys.replies(ingress))):
        message = messages.decode(entry.data)
        assert isinstance(message, messages.Replies)
        found += message.items
    return found


@asynccontextmanager
async def serving(
    redis: Redis,
    options: ReplicaSettings,
    iteration_s: Callable[[int, int], float] = lambda sequences, tokens: 0.0,
) -> AsyncIterator[Serving]:
    """The inference process's loops over a fake engine, drained at the end."""
    engine = FakeEngine(engine_config(options), iteration_s=iteration_s)
    feed = AdapterFeed(redis, options.keys, "", lambda data, manifest: {})
    running = Serving(options, redis, engine, feed, CpuUtilisation(), SystemClock())
    task = asyncio.create_task(running.run())
    try:
        yield running
    finally:
        running.drain()
        await asyncio.wait_for(task, 20)
