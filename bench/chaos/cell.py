"""A whole cell under test: broker on a small disk, a proxy before each service, two dispatchers, separate clocks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import psutil
from redis.asyncio import Redis

from bench.chaos.clocks import Clocks
from bench.chaos.proxy import Proxy
from collm_common.broker import AWAY, connection
from collm_common.clock import SystemClock, ticks
from collm_common.keys import Keys
from collm_common.registry import Registry
from collm_tools.stack.broker import free_port
from collm_tools.stack.options import StackOptions, service_specs
from collm_tools.stack.service import RestartPolicy, Service, Spec
from collm_tools.stack.stack import Stack
from tests.support.broker import Broker
from tests.support.models import tiny_model_folder

REPLICAS = ("r1", "r2", "r3")
DISPATCHERS = ("dispatcher-1", "dispatcher-2")
DISK_MB = 256
FOR_EVER = RestartPolicy(limit=1_000_000, backoff_s=0.1, backoff_max_s=0.5)
START_S = 90.0
SETTINGS = {
    "COLLM_DISPATCHER_SLO_CLASSES": json.dumps({"default": {"e2e_s": 60.0, "late": "serve"}}),
    "COLLM_REPLICA_CONTEXT_TOKENS": "512",
    "COLLM_REPLICA_KV_MB": "32",
    "COLLM_REPLICA_RESTART_LIMIT": "1000",
    "COLLM_REPLICA_RESTART_BACKOFF_S": "0.1",
    "COLLM_LAUNCHER_ADAPTERS": json.dumps({"tiny": "desk"}),
    "COLLM_LAUNCHER_TICK_S": "0.5",
    "COLLM_LAUNCHER_COOLDOWN_S": "5",
    "COLLM_LAUNCHER_RULES": json.dumps(
        {"rounds": 2, "steps": 6, "hyper": {"rank": 4, "alpha": 8.0, "max_tokens": 200, "heldout_samples": 4}}
    ),
}


@dataclass
class Cell:
    """Handles on all that a fault may touch. `disk` is the broker's own file system, None if it shares another."""

    stack: Stack
    broker: Broker
    redis: Redis
    keys: Keys
    proxies: dict[str, Proxy]
    urls: dict[str, str]
    disk: Path | None
    clocks: Clocks | None
    session: aiohttp.ClientSession

    def service(self, name: str) -> Service:
        """By the name of its spec."""
        return next(service for service in self.stack.services if service.spec.name == name)

    def process(self, name: str) -> psutil.Process | None:
        """The main process of a service, None between two lives."""
        process = self.service(name).process
        try:
            return psutil.Process(process.pid) if process is not None else None
        except psutil.NoSuchProcess:
            return None

    def child(self, replica: str, module: str) -> psutil.Process | None:
        """A replica's `inference` or `training` process, None between two lives."""
        try:
            parent = self.process(f"replica-{replica}")
            children = parent.children() if parent else []
            return next((child for child in children if f"collm_replica.{module}" in child.cmdline()), None)
        except psutil.Error:
            return None

    async def dispatch_leader(self) -> str:
        """Which dispatcher leads the model's streams now, by the connection that holds the lease; the first if none."""
        for name in DISPATCHERS:
            if await self._leads(name):
                return name
        return DISPATCHERS[0]

    async def whole(self) -> str:
        """What is not in order yet; "" when every service works."""
        try:
            return await self._replicas() or await self._leaders() or await self._ingresses()
        except AWAY as error:
            return f"broker: {error}"

    async def wait_whole(self, within_s: float) -> None:
        """Raises TimeoutError that says what is not in order after `within_s` seconds."""
        end_s = time.monotonic() + within_s
        async for _ in ticks(0.25, SystemClock()):
            if not (why := await self.whole()):
                return
            if time.monotonic() > end_s:
                raise TimeoutError(f"after {within_s:g} s: {why}")

    async def _replicas(self) -> str:
        infos = await Registry(self.redis, self.keys).replicas()
        for id_ in REPLICAS:
            info = infos.get(id_)
            if info is None or not info.ready or not info.alive:
                return f"{id_}: not ready"
            if trouble := await self._trouble(f"{info.data_url}/health"):
                return f"{id_}: {trouble}"
            if self.child(id_, "training") is None:
                return f"{id_}: no fine-tuning process"
        return ""

    async def _leaders(self) -> str:
        for name in ("launcher", "coordinator"):
            if not await self.redis.exists(self.keys.lease(name)) or self.process(name) is None:
                return f"nobody leads as {name}"
        return ""

    async def _ingresses(self) -> str:
        for name, url in self.urls.items():
            if trouble := await self._trouble(f"{url}/ready"):
                return f"{name}: {trouble}"
        return ""

    async def _trouble(self, url: str) -> str:
        """Why a health check fails, "" if it does not."""
        try:
            async with self.session.get(url, timeout=aiohttp.ClientTimeout(total=2)) as response:
                return "" if response.status == 200 else f"HTTP {response.status}"
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return type(error).__name__

    async def _leads(self, name: str) -> bool:
        token = await self.redis.get(self.keys.lease("dispatch:tiny"))
        return bool(token) and bytes(token).startswith(f"{name}-".encode())


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """A file system of DISK_MB at `folder` if this user may mount one, else None."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "collm-chaos", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def data_folders(folder: Path) -> list[Path]:
    """Private samples for each replica."""
    folders = []
    for number, _ in enumerate(REPLICAS):
        own = folder / f"data{number}"
        own.mkdir(parents=True)
        rows = [{"prompt": f"item {n} of {number}?", "completion": f"drawer {n % 3}"} for n in range(24)]
        (own / "private.jsonl").write_text("\n".join(map(json.dumps, rows)))
        folders.append(own)
    return folders


def specs(
    options: StackOptions, model: Path, ports: Mapping[str, int], proxies: Mapping[str, Proxy], clocks: Clocks | None
) -> list[Spec]:
    """The services of a local stack with a second dispatcher, each with its own way to the broker and clock."""
    plain = service_specs(options, model, "", 0)[1:]
    for name in DISPATCHERS:
        plain.append(replace(service_specs(options, model, "", ports[name])[0], name=name))
    return [_wired(spec, proxies[spec.name], clocks) for spec in plain]


def _wired(spec: Spec, proxy: Proxy, clocks: Clocks | None) -> Spec:
    env = {**spec.env, "COLLM_REDIS_URL": f"redis://127.0.0.1:{proxy.port}/0"}
    if spec.name.startswith("dispatcher"):
        env["COLLM_DISPATCHER_ID"] = spec.name
    if clocks is not None:
        env |= clocks.environment(spec.name)
    return replace(spec, env=env)


@asynccontextmanager
async def running(folder: Path, env: Mapping[str, str], log: Callable[[str], None]) -> AsyncIterator[Cell]:
    """A cell in which everything is ready; afterwards nothing of it is left."""
    clocks = Clocks(folder / "clocks") if Clocks.possible() else None
    model = tiny_model_folder(folder / "model", "llama", num_hidden_layers=4)
    with small_disk(folder / "disk") as disk:
        broker = Broker(folder / "disk")
        await asyncio.to_thread(broker.start)
        names = [*DISPATCHERS, *(f"replica-{replica}" for replica in REPLICAS), "launcher", "coordinator"]
        proxies = {name: Proxy(broker.port) for name in names}
        ports = {name: free_port() for name in DISPATCHERS}
        options = StackOptions(
            str(model),
            "tiny",
            folder / "run",
            redis_url=broker.url,
            data_dirs=data_folders(folder),
            env={**SETTINGS, "COLLM_REPLICA_RUN_DIR": str(folder), **env},
        )
        for proxy in proxies.values():
            await proxy.start()
        stack = Stack(options, log, FOR_EVER, lambda url: specs(options, model, ports, proxies, clocks))
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        try:
            async with stack, connection(broker.url) as redis, aiohttp.ClientSession() as session:
                cell = Cell(stack, broker, redis, stack.keys, proxies, urls, disk, clocks, session)
                await cell.wait_whole(START_S)
                yield cell
        finally:
            await asyncio.gather(*(proxy.close() for proxy in proxies.values()))
            await asyncio.to_thread(broker.stop, signal.SIGKILL)
