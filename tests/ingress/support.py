"""A whole front: ingress, dispatch loop and replicas with fake engines, on the real broker, spoken to over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct
from redis.asyncio import Redis

from collm_common import messages
from collm_common.broker import stop_all
from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_common.messages import Cancel
from collm_common.streams import Tail
from collm_common.tracing import UNTRACED, Tracer
from collm_dispatcher.dispatch import Dispatch, dispatching
from collm_dispatcher.ingress.service import Ingress, ingress
from collm_replica.serving import Serving
from tests.dispatcher.support import dispatcher_settings, replica
from tests.support.users import as_user

SLOW_S = 0.01


class Front(Struct):
    """`http` resolves paths against the ingress."""

    ingress: Ingress
    http: aiohttp.ClientSession
    replicas: dict[str, Serving]
    dispatch: Dispatch

    async def post(self, path: str, body: Any, **kwargs: Any) -> tuple[int, dict[str, Any]]:
        """Status and JSON body."""
        async with self.http.post(path, json=body, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON body."""
        async with self.http.get(path) as response:
            return response.status, await response.json()

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Every event of a streamed answer; it must end with [DONE]."""
        async with self.http.post(path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            return chunks(await response.text())


def chunks(text: str) -> list[dict[str, Any]]:
    """The events of a whole stream."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    """A body for /v1/chat/completions."""
    return {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 6, **fields}


def text(prompt: Any = "abc", **fields: Any) -> dict[str, Any]:
    """A body for /v1/completions."""
    return {"model": "m", "prompt": prompt, "max_tokens": 6, **fields}


@asynccontextmanager
async def front(
    redis: Redis,
    keys: Keys,
    folder: Path,
    *,
    replicas: int = 1,
    step_s: float = 0.0,
    spans: Tracer = UNTRACED,
    **changes: Any,
) -> AsyncIterator[Front]:
    """`replicas` of model `m` (r1, r2, …), an ingress on a free port and a dispatch loop with a dispatcher's rights."""
    settings = dispatcher_settings(models={"m": str(folder)}, host="127.0.0.1", **changes)
    settings = type(settings)(**{**_fields(settings), "port": 0})
    clock = SystemClock()
    async with AsyncExitStack() as stack:
        running = {}
        for number in range(1, replicas + 1):
            id_ = f"r{number}"
            serving = await stack.enter_async_context(replica(redis, keys, id_, lambda s, t: step_s))
            listener = asyncio.create_task(_obey(redis, keys, id_, serving))
            stack.push_async_callback(stop_all, listener)
            running[id_] = serving
        own = await stack.enter_async_context(as_user(redis, "dispatcher"))
        dispatch = await stack.enter_async_context(dispatching(settings, own, "d1", clock))
        inside = await stack.enter_async_context(ingress(settings, own, clock, spans))
        http = aiohttp.ClientSession(f"http://127.0.0.1:{inside.port}")
        stack.push_async_callback(http.close)
        yield Front(inside, http, running, dispatch)


def _fields(settings: Any) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__struct_fields__}


async def _obey(redis: Redis, keys: Keys, id_: str, serving: Serving) -> None:
    """The part of a supervisor that passes cancellations on."""
    tail = Tail(redis, keys.control(id_))
    await tail.start("0")
    while True:
        for entry in await tail.read(64, 0.2):
            if isinstance(message := messages.decode(entry.data), Cancel):
                serving.cancel(message.id)
