"""The front of tests/ingress/support.py over one replica that computes: a tiny model, its adapters, its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from collm_common import messages
from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_common.messages import LoadAdapter, UnloadAdapter
from collm_common.streams import Tail
from collm_common.tracing import UNTRACED, Tracer
from collm_replica.adapter_feed import AdapterFeed
from collm_replica.adapters import decode
from collm_replica.serving import Serving
from collm_replica.telemetry import CpuUtilisation
from tests.dispatcher.support import register
from tests.engine.harness import make_engine
from tests.ingress.support import Front, front
from tests.replica.support import settings

DIGEST = "d" * 16


@asynccontextmanager
async def real_front(
    redis: Redis, keys: Keys, folder: Path, spans: Tracer = UNTRACED, **changes: Any
) -> AsyncIterator[tuple[Front, Serving]]:
    """`changes` are of the ingress; model `m` is served from `folder` by replica r1 with context 128 and 3 slots."""
    await register(redis, keys, context_tokens=128, base_digest=DIGEST)
    serving = Serving(
        settings(id="r1"),
        redis,
        make_engine(folder),
        AdapterFeed(redis, keys, DIGEST, decode),
        CpuUtilisation(),
        SystemClock(),
        spans,
    )
    running = asyncio.create_task(serving.run())
    listener = asyncio.create_task(_obey(redis, keys, serving))
    try:
        async with AsyncExitStack() as stack:
            yield (
                await stack.enter_async_context(front(redis, keys, folder, replicas=0, spans=spans, **changes)),
                serving,
            )
    finally:
        listener.cancel()
        serving.drain()
        await asyncio.wait_for(running, 20)


async def _obey(redis: Redis, keys: Keys, serving: Serving) -> None:
    tail = Tail(redis, keys.control("r1"))
    await tail.start("0")
    while True:
        for entry in await tail.read(64, 0.1):
            match messages.decode(entry.data):
                case messages.Cancel(id=id_):
                    serving.cancel(id_)
                case LoadAdapter(name=name, version=version):
                    await serving.versions.load(name, version)
                case UnloadAdapter(name=name):
                    serving.versions.unload(name)
