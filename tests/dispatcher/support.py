"""Replicas with a fake engine in the registry, and requests on an original stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_common.messages import Request
from collm_common.registry import Registry
from collm_common.types import ReplicaInfo, ReplicaState
from collm_dispatcher.dispatch import Dispatch, dispatching
from collm_dispatcher.settings import DispatcherSettings
from collm_replica.serving import Serving
from tests.replica.support import serving
from tests.replica.support import settings as replica_settings


def dispatcher_settings(**changes: Any) -> DispatcherSettings:
    """Quick to notice everything."""
    defaults: dict[str, Any] = {
        "refresh_s": 0.05,
        "macro_s": 0.05,
        "lease_ttl_s": 0.6,
        "away_grace_s": 0.2,
        "pause_s": 0.1,
        "resume_s": 0.2,
    }
    return DispatcherSettings(**{**defaults, **changes})


async def register(redis: Redis, keys: Keys, id_: str = "r1", lease_s: float = 60.0, **changes: Any) -> None:
    """A ready Serving replica of model `m`, batch 4."""
    fields: dict[str, Any] = {
        "model": "m",
        "incarnation": "i",
        "state": ReplicaState.SERVING,
        "ready": True,
        "infer_batch_max": 4,
        "context_tokens": 256,
    }
    await Registry(redis, keys).register(ReplicaInfo(id=id_, **{**fields, **changes}), lease_s)


@asynccontextmanager
async def replica(
    redis: Redis,
    keys: Keys,
    id_: str = "r1",
    iteration_s: Callable[[int, int], float] = lambda sequences, tokens: 0.0,
    **changes: Any,
) -> AsyncIterator[Serving]:
    """Registered, and served by a fake engine."""
    await register(redis, keys, id_, **changes)
    async with serving(redis, replica_settings(id=id_, context_tokens=256), iteration_s) as running:
        yield running


@asynccontextmanager
async def dispatcher(redis: Redis, holder: str = "d1", **changes: Any) -> AsyncIterator[Dispatch]:
    """A dispatch loop."""
    async with dispatching(dispatcher_settings(**changes), redis, holder, SystemClock()) as running:
        yield running


async def offer(redis: Redis, keys: Keys, *requests: Request) -> None:
    """Append to the original streams, as an ingress does."""
    for message in requests:
        await redis.sadd(keys.streams, f"{message.model}|{message.slo.name}")
        key = keys.requests(message.model, message.slo.name)
        await streams.append(redis, key, "request", message.id, messages.encode(message))


async def lengths(redis: Redis, keys: Keys, *replicas: str) -> list[int]:
    """How many requests each replica has."""
    return [int(n) for n in await asyncio.gather(*(redis.xlen(keys.subflow(id_)) for id_ in replicas))]
