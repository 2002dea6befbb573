"""A cell in which jobs come to their end: launcher, coordinator, three replicas that train at once, and their data."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis

from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_coordinator.service import Coordinator
from collm_coordinator.settings import CoordinatorSettings
from collm_launcher.service import Launcher
from collm_replica.data_endpoint import DataEndpoint
from collm_replica.finetune.records import check_text
from tests.ingress.support import Front, front
from tests.launcher.support import SimReplica, replicas, running, settings

LINES = [json.dumps({"prompt": f"question {i}", "completion": f"answer {i}"}) for i in range(7)]


async def no_digest() -> str:
    """Where nobody asks for it."""
    return ""


@asynccontextmanager
async def tuning_cell(
    redis: Redis, keys: Keys, tokenizer: Path, data: Path
) -> AsyncIterator[tuple[Front, list[SimReplica]]]:
    """Replica r1 keeps its data under `data`/r1, and so on."""
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        members = await stack.enter_async_context(replicas(redis, keys))
        for member in members:
            endpoint = DataEndpoint(data / member.id, 1 << 20, check_text, no_digest, lambda: "")
            port = await endpoint.start("127.0.0.1", 0)
            stack.push_async_callback(endpoint.close)
            await redis.hset(keys.replica(member.id), "data_url", f"http://127.0.0.1:{port}")
        launcher = Launcher(settings(adapters={}), redis, clock)
        await stack.enter_async_context(running(launcher, Coordinator(CoordinatorSettings(), redis, clock)))
        yield await stack.enter_async_context(front(redis, keys, tokenizer, replicas=0)), members
