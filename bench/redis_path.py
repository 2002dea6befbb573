"""What the live path adds to a request, and what it carries: its replicas compute nothing.

`redis`: from the ingress's append to its first token. `http`: the whole path, from a client's request to the first
event of its streamed answer. Broker, dispatcher and replicas are processes of their own; requests come open loop. CPU
is what each part used a request, which other work on the machine hardly changes; the client's is not among it. With
--limit-ms it fails if the median of the first row is above it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import psutil
import uvloop
from msgspec import Struct
from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.broker import connection
from collm_common.clock import SystemClock, ticks
from collm_common.keys import Keys
from collm_common.messages import Delta, Done, Replies, Request
from collm_common.registry import Registry
from collm_common.types import SamplingParams, Slo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.broker import Broker, free_port
from tests.support.models import byte_tokenizer

MODEL, INGRESS, KEYS, SLO = "bench", "bench", Keys(), Slo("default")
REPLICAS, START_S, TAIL_S = 2, 60.0, 20.0
PROMPT, TOKENS = 128, 4
CPU = "CPU ms a request:"


class Cell(Struct):
    """The running processes by part; the ingress and the dispatch loop share one."""

    parts: dict[str, list[psutil.Process]]
    redis: Redis
    url: str

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far, children included."""
        return {part: sum(_cpu_s(process) for process in found) for part, found in self.parts.items()}


def _cpu_s(process: psutil.Process) -> float:
    return sum(sum(each.cpu_times()[:2]) for each in (process, *process.children(recursive=True)))


async def spawn(stack: AsyncExitStack, module: str, *arguments: str, **settings: str) -> psutil.Process:
    """A service as a process, ended with the stack."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, env={**os.environ, "COLLM_LOG_LEVEL": "WARNING", **settings}
    )

    async def end() -> None:
        if process.returncode is None:
            process.terminate()
        await process.wait()

    stack.push_async_callback(end)
    return psutil.Process(process.pid)


async def start(stack: AsyncExitStack) -> Cell:
    """Broker, dispatcher and replicas, all ready."""
    broker = Broker()
    broker.start()
    stack.callback(broker.close)
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    byte_tokenizer().save_pretrained(folder)
    shared, port = {"COLLM_REDIS_URL": broker.url}, free_port()
    front = {"MODELS": f'{{"{MODEL}": "{folder}"}}', "PORT": str(port), "HOST": "127.0.0.1"}
    named = {f"COLLM_DISPATCHER_{name}": value for name, value in front.items()}
    dispatcher = await spawn(stack, "collm_dispatcher", **shared, **named)
    replicas = []
    for number in range(REPLICAS):
        own = {"ID": f"r{number}", "MODEL": "none", "SERVED_NAME": MODEL, "ENGINE": "fake", "FAKE_STEP_S": "0"}
        own |= {"MAX_BATCH": "32", "DATA_DIR": f"{folder}/data{number}"}
        values = {f"COLLM_REPLICA_{name}": value for name, value in own.items()}
        replicas.append(await spawn(stack, "collm_replica", **shared, **values))
    redis = await stack.enter_async_context(connection(broker.url))
    assert broker.process is not None
    parts = {"dispatcher": [dispatcher], "replicas": replicas, "broker": [psutil.Process(broker.process.pid)]}
    cell = Cell(parts, redis, f"http://127.0.0.1:{port}")
    await wait_until_ready(cell)
    return cell


async def wait_until_ready(cell: Cell) -> None:
    """Some requests through everything."""
    async with asyncio.timeout(START_S):
        async for _ in ticks(0.1, SystemClock()):
            if sum(replica.ready for replica in (await Registry(cell.redis, KEYS).replicas()).values()) == REPLICAS:
                break
        for way in WAYS.values():
            await way(cell, 20, 20)


async def paced(rate: float, count: int, act: Callable[[], Awaitable[None]]) -> None:
    """`count` times at `rate` a second, however long each takes."""
    start_s, loop = time.perf_counter(), asyncio.get_running_loop()
    tasks = []
    for number in range(count):
        await asyncio.sleep(max(0.0, start_s + number / rate - time.perf_counter()))
        tasks.append(loop.create_task(_awaited(act())))
    await asyncio.wait_for(asyncio.gather(*tasks), TAIL_S)


async def _awaited(work: Awaitable[None]) -> None:
    await work


async def through_redis(cell: Cell, rate: float, count: int) -> list[float]:
    """Milliseconds from append to the first token."""
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    done: set[str] = set()
    tail = streams.Tail(cell.redis, KEYS.replies(INGRESS))
    await tail.start()

    async def listen() -> None:
        while len(done) < count:
            for entry in await tail.read(512):
                message = messages.decode(entry.data)
                assert isinstance(message, Replies)
                for reply in message.items:
                    if isinstance(reply, Delta):
                        first.setdefault(reply.id, time.perf_counter())
                    elif isinstance(reply, Done):
                        done.add(reply.id)

    async def send() -> None:
        request = ask()
        sent[request.id] = time.perf_counter()
        key = KEYS.requests(MODEL, SLO.name)
        await streams.append(cell.redis, key, "request", request.id, messages.encode(request))

    listener = asyncio.create_task(listen())
    await paced(rate, count, send)
    await asyncio.wait_for(listener, TAIL_S)
    return [1000 * (first[id_] - sent_s) for id_, sent_s in sent.items()]


def ask() -> Request:
    """As the ingress would write it."""
    return Request(
        id=uuid.uuid4().hex,
        ingress=INGRESS,
        model=MODEL,
        prompt=tuple(range(PROMPT)),
        sampling=SamplingParams(max_tokens=TOKENS),
        slo=SLO,
        arrival_s=time.time(),
        deadline_s=float("inf"),
    )


async def through_http(cell: Cell, rate: float, count: int) -> list[float]:
    """Milliseconds from a client's request to the first event of its answer."""
    took: list[float] = []
    body = {"model": MODEL, "prompt": "x" * PROMPT, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}

    async with aiohttp.ClientSession(cell.url, connector=aiohttp.TCPConnector(limit=0)) as http:

        async def send() -> None:
            sent_s = time.perf_counter()
            async with http.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                await response.content.readany()
                took.append(1000 * (time.perf_counter() - sent_s))
                await response.read()

        await paced(rate, count, send)
    return took


WAYS: Mapping[str, Callable[[Cell, float, int], Awaitable[list[float]]]] = {
    "redis": through_redis,
    "http": through_http,
}


async def run(ways: list[str], rates: list[float], seconds: float) -> list[float]:
    """Print a row for each way and rate; their medians."""
    medians: list[float] = []
    async with AsyncExitStack() as stack:
        cell = await start(stack)
        head = f"{'path':>6} {'offered/s':>10} {'carried/s':>10} {'p50 ms':>8} {'p99 ms':>8}   {CPU}"
        print(head + " ".join(f"{part:>11}" for part in cell.parts))
        for way in ways:
            for rate in rates:
                count = round(rate * seconds)
                before, start_s = cell.cpu_s(), time.perf_counter()
                cuts = statistics.quantiles(await WAYS[way](cell, rate, count), n=100)
                carried = count / (time.perf_counter() - start_s)
                used = [1000 * (after - before[part]) / count for part, after in cell.cpu_s().items()]
                cpu = " ".join(f"{value:>11.2f}" for value in used)
                print(
                    f"{way:>6} {rate:>10.0f} {carried:>10.0f} {cuts[49]:>8.2f} {cuts[98]:>8.2f}   {'':{len(CPU)}}{cpu}"
                )
                medians.append(cuts[49])
    return medians


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paths", nargs="+", choices=tuple(WAYS), default=["redis", "http"])
    parser.add_argument("--rates", type=float, nargs="+", default=[200.0, 400.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long at each rate")
    parser.add_argument("--limit-ms", type=float, help="fail if the first row's median is above this")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{PROMPT} tokens in, {TOKENS} out, {REPLICAS} replicas, {os.cpu_count()} cores, load average {load:.1f}")
    medians = uvloop.run(run(arguments.paths, arguments.rates, arguments.seconds))
    if arguments.limit_ms is not None and medians[0] > arguments.limit_ms:
        sys.exit(f"the median at {arguments.rates[0]:.0f} requests/s is above {arguments.limit_ms:g} ms")


if __name__ == "__main__":
    main()
