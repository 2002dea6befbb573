"""The local stack: broker and services up in order, watched, and down without a process left behind."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp

from collm_common.broker import AWAY, connection
from collm_common.clock import checkpoint
from collm_common.keys import Keys
from collm_common.registry import Registry
from collm_common.settings import Common
from collm_tools.stack.broker import broker_spec, free_port, require_free, wait_for_broker
from collm_tools.stack.model import resolve_model
from collm_tools.stack.options import StackOptions, service_specs, unknown_variables
from collm_tools.stack.service import RestartPolicy, Service, ServiceError, Spec

BROKER_START_S = 20.0
POLL_S = 0.25
STOP_BROKER_S = 10.0

T = TypeVar("T")


class Stack:
    """`async with Stack(options) as stack`: inside, every service is ready; afterwards, none is left.

    `specs` replaces the CoLLM services by others (the broker stays); `wait_ready` is then up to the caller.
    """

    def __init__(
        self,
        options: StackOptions,
        notify: Callable[[str], None] = lambda line: None,
        restarts: RestartPolicy | None = None,
        specs: Callable[[str], list[Spec]] | None = None,
    ) -> None:
        self.options = options
        self.port = options.port or free_port()
        self.url = f"http://{options.host}:{self.port}"
        self.redis_port = options.redis_port or free_port()
        self.redis_url = options.redis_url or f"redis://127.0.0.1:{self.redis_port}/0"
        self.broker: Service | None = None
        self.services: list[Service] = []
        self._notify, self._restarts, self._specs = notify, restarts, specs
        self._watchers: list[asyncio.Task[None]] = []

    @property
    def keys(self) -> Keys:
        """Key names of the stack's cell."""
        return Keys(self.options.env.get("COLLM_KEY_PREFIX", Common().key_prefix))

    async def __aenter__(self) -> Self:
        if self.options.port:
            require_free(self.options.host, self.options.port, "the HTTP service")
        try:
            await self._start_broker()
            await self._start_services()
            if self._specs is None:
                await self.guard(self.wait_ready())
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def run(self) -> None:
        """Until a service gives up: ServiceError. Cancel it to end sooner."""
        await self.guard(asyncio.Event().wait())

    async def wait_ready(self) -> None:
        """Until every replica serves and the HTTP service says so. Raises ServiceError after `ready_s` seconds."""
        end_s = time.monotonic() + self.options.ready_s
        seen = -1
        async with connection(self.redis_url) as redis, aiohttp.ClientSession() as session:
            registry = Registry(redis, self.keys)
            while True:
                checkpoint()
                ready = await _ready_replicas(registry)
                if ready != seen:
                    self._notify(f"{ready} of {self.options.replicas} replicas ready")
                    seen = ready
                if ready >= self.options.replicas and await _http_ready(session, self.url):
                    return
                if time.monotonic() > end_s:
                    raise ServiceError(
                        f"not ready within {self.options.ready_s:g} s: {ready} of {self.options.replicas} replicas; "
                        f"logs are in {self.options.run_dir / 'logs'}"
                    )
                await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """SIGTERM to all services at once, SIGKILL after the grace; the broker last."""
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await asyncio.gather(*(service.stop(self.options.grace_s) for service in self.services))
        if self.broker is not None:
            await self.broker.stop(STOP_BROKER_S)

    async def _start_broker(self) -> None:
        if not self.options.redis_url:
            require_free("127.0.0.1", self.redis_port, "the embedded broker")
            spec = broker_spec(self.redis_port, self.options.run_dir / "broker", self.options.redis_server)
            self.broker = self._service(spec)
            await self.broker.start()
        await wait_for_broker(self.redis_url, BROKER_START_S, self.broker)
        if self.broker is not None:
            self._watchers.append(asyncio.create_task(self.broker.watch()))
        self._notify(f"broker at {self.redis_url}")

    async def _start_services(self) -> None:
        if self._specs is not None:
            specs = self._specs(self.redis_url)
        else:
            self._notify(f"preparing the model {self.options.model}")
            model = await resolve_model(self.options.model, self.options.cache_dir, self.options.ready_s)
            for index in range(self.options.replicas):
                self.options.data_dir(index).mkdir(parents=True, exist_ok=True)
            for variable in unknown_variables(os.environ):
                self._notify(f"{variable} is ignored: it is no setting of any service")
            specs = service_specs(self.options, model, self.redis_url, self.port)
        self._notify(f"starting {', '.join(spec.name for spec in specs)}")
        for spec in specs:
            service = self._service(spec)
            self.services.append(service)
            await service.start()
            self._watchers.append(asyncio.create_task(service.watch()))

    def _service(self, spec: Spec) -> Service:
        return Service(spec, self.options.run_dir / "logs" / f"{spec.name}.log", self._restarts, self._notify)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, unless a service gives up first: then its error."""
        task = asyncio.create_task(work)
        try:
            while not task.done():
                watched = [watcher for watcher in self._watchers if not watcher.done() or watcher.exception()]
                done, _ = await asyncio.wait([task, *watched], return_when=asyncio.FIRST_COMPLETED)
                for ended in done - {task}:
                    await ended
            return await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _ready_replicas(registry: Registry) -> int:
    try:
        return sum(info.ready and info.alive for info in (await registry.replicas()).values())
    except AWAY:
        return 0


async def _http_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/ready", timeout=aiohttp.ClientTimeout(total=5)) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False
