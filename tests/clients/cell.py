"""A whole cell for other people's clients: one replica that computes and takes data, a launcher, every route."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis

from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_launcher.service import Launcher
from collm_replica.data_endpoint import DataEndpoint
from collm_replica.finetune.records import check_text
from tests.ingress.real import real_front
from tests.ingress.support import Front
from tests.ingress.tuning import no_digest
from tests.launcher.support import running, settings


@asynccontextmanager
async def client_cell(redis: Redis, keys: Keys, model: Path, folder: Path) -> AsyncIterator[Front]:
    """Model `m` of `model`; data below `folder`/data, adapters from outside in `folder`/adapters."""
    (folder / "adapters").mkdir()
    async with AsyncExitStack() as stack:
        site, _ = await stack.enter_async_context(
            real_front(redis, keys, model, adapter_dir=str(folder / "adapters"), request_timeout_s=30.0)
        )
        endpoint = DataEndpoint(folder / "data", 1 << 20, check_text, no_digest, lambda: "")
        port = await endpoint.start("127.0.0.1", 0)
        stack.push_async_callback(endpoint.close)
        await redis.persist(keys.lease("r1"))
        await redis.hset(keys.replica("r1"), "data_url", f"http://127.0.0.1:{port}")
        await stack.enter_async_context(running(Launcher(settings(adapters={}), redis, SystemClock())))
        yield site
