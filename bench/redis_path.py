"""What the Redis path adds to a request, from the ingress's XADD to its first reply: its replicas compute nothing.

Broker, dispatcher and replicas are processes of their own; requests come open loop. Prints a table. With --limit-ms it
fails if the median at the first rate is above it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
import uuid
from contextlib import AsyncExitStack
from pathlib import Path

import uvloop
from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.broker import connection
from collm_common.clock import SystemClock, ticks
from collm_common.keys import Keys
from collm_common.messages import Delta, Done, Replies, Request
from collm_common.registry import Registry
from collm_common.types import SamplingParams, Slo

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.broker import Broker

MODEL, INGRESS, KEYS, SLO = "bench", "bench", Keys(), Slo("default")
REPLICAS, START_S, TAIL_S = 2, 60.0, 10.0


async def spawn(stack: AsyncExitStack, module: str, *arguments: str, **settings: str) -> None:
    """A service as a process, ended with the stack."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, env={**os.environ, "COLLM_LOG_LEVEL": "WARNING", **settings}
    )

    async def end() -> None:
        if process.returncode is None:
            process.terminate()
        await process.wait()

    stack.push_async_callback(end)


async def start(stack: AsyncExitStack, url: str) -> None:
    """The dispatch loop and the replicas, all ready."""
    shared = {"COLLM_REDIS_URL": url}
    await spawn(stack, "collm_dispatcher", "--role", "dispatch", **shared)
    for number in range(REPLICAS):
        own = {"ID": f"r{number}", "MODEL": "none", "SERVED_NAME": MODEL, "ENGINE": "fake", "FAKE_STEP_S": "0"}
        own |= {"MAX_BATCH": "32", "DATA_DIR": f"/tmp/collm-bench-{os.getpid()}-{number}"}
        await spawn(stack, "collm_replica", **shared, **{f"COLLM_REPLICA_{name}": value for name, value in own.items()})


async def wait_until_ready(redis: Redis) -> None:
    """One request through everything."""
    await redis.sadd(KEYS.streams, f"{MODEL}|{SLO.name}")
    async with asyncio.timeout(START_S):
        async for _ in ticks(0.1, SystemClock()):
            if sum(replica.ready for replica in (await Registry(redis, KEYS).replicas()).values()) == REPLICAS:
                break
        await measure(redis, rate=20, count=20)


async def measure(redis: Redis, rate: float, count: int) -> list[float]:
    """Milliseconds from append to the first token, for each of `count` requests at `rate` a second."""
    sent: dict[str, float] = {}
    first: dict[str, float] = {}
    done: set[str] = set()
    tail = streams.Tail(redis, KEYS.replies(INGRESS))
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

    listener = asyncio.create_task(listen())
    start_s = time.perf_counter()
    for number in range(count):
        await asyncio.sleep(max(0.0, start_s + number / rate - time.perf_counter()))
        request = ask()
        sent[request.id] = time.perf_counter()
        key = KEYS.requests(MODEL, SLO.name)
        await streams.append(redis, key, "request", request.id, messages.encode(request))
    await asyncio.wait_for(listener, TAIL_S)
    return [1000 * (first[id_] - sent_s) for id_, sent_s in sent.items()]


def ask() -> Request:
    """128 tokens in, 4 out."""
    return Request(
        id=uuid.uuid4().hex,
        ingress=INGRESS,
        model=MODEL,
        prompt=tuple(range(128)),
        sampling=SamplingParams(max_tokens=4),
        slo=SLO,
        arrival_s=time.time(),
        deadline_s=float("inf"),
    )


async def run(rates: list[float], seconds: float) -> list[tuple[float, float, float]]:
    """(rate, p50, p99) in requests a second and milliseconds."""
    broker = Broker()
    broker.start()
    try:
        async with AsyncExitStack() as stack:
            await start(stack, broker.url)
            redis = await stack.enter_async_context(connection(broker.url))
            await wait_until_ready(redis)
            rows = []
            for rate in rates:
                cuts = statistics.quantiles(await measure(redis, rate, round(rate * seconds)), n=100)
                rows.append((rate, cuts[49], cuts[98]))
            return rows
    finally:
        broker.close()


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=[100.0, 200.0], help="requests a second")
    parser.add_argument("--seconds", type=float, default=8.0, help="how long at each rate")
    parser.add_argument("--limit-ms", type=float, help="fail if the first rate's median is above this")
    arguments = parser.parse_args()
    rows = uvloop.run(run(arguments.rates, arguments.seconds))
    print(f"added by the Redis path, {REPLICAS} replicas without compute, append to first token")
    print(f"{'requests/s':>10} {'p50 ms':>8} {'p99 ms':>8}")
    for rate, p50, p99 in rows:
        print(f"{rate:>10.0f} {p50:>8.2f} {p99:>8.2f}")
    if arguments.limit_ms is not None and rows[0][1] > arguments.limit_ms:
        sys.exit(f"the median at {rows[0][0]:.0f} requests/s is above {arguments.limit_ms:g} ms")


if __name__ == "__main__":
    main()
