"""The bench of faults itself: a fault that does nothing, or an account that sees nothing, would prove anything."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from bench.chaos import accounts
from bench.chaos.__main__ import schedule
from bench.chaos.clients import Record, verdict
from bench.chaos.clocks import Clocks
from bench.chaos.faults import FAULTS
from bench.chaos.proxy import Proxy
from collm_common import post
from collm_common.keys import Keys
from collm_common.messages import StateChanged
from collm_common.types import ReplicaState


@asynccontextmanager
async def echo() -> AsyncIterator[tuple[Proxy, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection through a proxy to a server that sends back what it gets."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    await proxy.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield proxy, reader, writer
    finally:
        writer.close()
        await proxy.close()
        server.close()


async def test_what_is_withheld_arrives_later_and_in_order() -> None:
    """A partition that loses bytes would be a fault that TCP cannot have."""
    async with echo() as (proxy, reader, writer):
        proxy.withhold()
        writer.write(b"one")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        writer.write(b"two")
        proxy.let_through()
        assert await asyncio.wait_for(reader.readexactly(6), 5) == b"onetwo"


async def test_a_cut_resets_what_is_open_and_serves_what_comes_next() -> None:
    """A cut that nobody notices, or a proxy that is dead after it."""
    async with echo() as (proxy, reader, writer):
        writer.write(b"one")
        assert await asyncio.wait_for(reader.readexactly(3), 5) == b"one"
        proxy.cut()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1), 5)
        again, other = await asyncio.open_connection("127.0.0.1", proxy.port)
        other.write(b"two")
        assert await asyncio.wait_for(again.readexactly(3), 5) == b"two"
        other.close()


async def test_a_delay_takes_its_time_each_way() -> None:
    """A slow network that is not slow."""
    async with echo() as (proxy, reader, writer):
        proxy.delay_s = 0.05
        start_s = time.monotonic()
        writer.write(b"one")
        await asyncio.wait_for(reader.readexactly(3), 5)
        assert time.monotonic() - start_s >= 0.1


def test_a_clock_steps_while_its_process_runs_and_the_monotonic_one_does_not(tmp_path: Path) -> None:
    """A step of the clock that no service sees."""
    clocks = Clocks(tmp_path / "clocks")
    program = "import time\nwhile True:\n    input()\n    print(time.time(), time.monotonic(), flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **clocks.environment("one")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        seen = []
        for offset_s in (0, 3600, -3600):
            clocks.step("one", offset_s)
            process.stdin.write("\n")
            process.stdin.flush()
            wall_s, monotonic_s = map(float, process.stdout.readline().split())
            seen.append((wall_s - time.time(), monotonic_s - time.monotonic()))
        process.kill()
    assert [wall_s for wall_s, _ in seen] == pytest.approx([0, 3600, -3600], abs=5)
    assert [monotonic_s for _, monotonic_s in seen] == pytest.approx([0, 0, 0], abs=5)


@pytest.mark.parametrize(
    ("text", "finished", "wrong"),
    [
        ("the tide comes in", True, ""),
        ("the tide", True, "lost"),
        ("the tide comes in", False, "lost"),
        ("the tide the tide comes in", True, "repeated"),
        ("the tide goes out", True, "mixed"),
        ("the tide comes in again", True, "mixed"),
    ],
)
def test_an_answer_that_is_not_the_undisturbed_one_is_named(text: str, finished: bool, wrong: str) -> None:
    """Accounts that are even whatever clients were told."""
    assert verdict(text, finished, "the tide comes in").partition(":")[0] == wrong


def test_bad_records_are_counted_by_kind_and_told() -> None:
    """A lost request that the report does not show."""
    records = [Record("streaming", "u", 0.0, completed=True), Record("whole", "u", 0.0, fault="lost: x")]
    ends, problems = accounts.of_requests(records)
    assert ends["completed"] == ends["lost"] == 1
    assert problems == ["whole by u: lost: x"]


def test_a_schedule_strikes_with_every_fault_alone_and_then_in_pairs() -> None:
    """A run that is called complete and has left kinds out."""
    turns = schedule(FAULTS, 200, random.Random(1))
    alone = Counter(turn[0].name for turn in turns if len(turn) == 1)
    assert sum(map(len, turns)) == 200
    assert set(alone) == {fault.name for fault in FAULTS}
    assert max(alone.values()) - min(alone.values()) <= 1
    assert all(first is not second for first, second in (turn for turn in turns if len(turn) == 2))


async def test_leaks_and_illegal_transitions_are_found(redis: Redis, keys: Keys) -> None:
    """Accounts that find every broker in order."""
    assert await accounts.of_keys(redis, keys) == []
    await redis.xadd(keys.subflow("r1"), {"kind": "request"})
    await redis.set(keys.lease("launcher"), "x")
    await redis.hset(keys.update("j1", 2, "r1"), "manifest", "x")
    await redis.set("{collm}:else", 1)
    told = " ".join(await accounts.of_keys(redis, keys))
    for part in ("1 entries left", "lease:launcher would stay", "a job that has ended", "unknown key {collm}:else"):
        assert part in told
    leap = StateChanged(replica="r1", before=ReplicaState.SERVING, after=ReplicaState.COMBINED, reason="x", time_s=0.0)
    await post.event(redis, keys, leap, "r1")
    assert await accounts.of_events(redis, keys) == ({"changes of state": 1}, ["r1: serving -> combined: x"])


async def test_growth_of_what_is_kept_is_found(redis: Redis, keys: Keys) -> None:
    """A leak that is called flat, or a bounded stream that fills up and is called a leak."""
    await redis.set(keys.config("r1"), b"x" * 10_000)
    first = await accounts.kept_bytes(redis, keys)
    await redis.xadd(keys.telemetry, {"data": b"x" * 100_000})
    assert accounts.of_memory(first, await accounts.kept_bytes(redis, keys), 0.25) == []
    await redis.set(keys.config("r2"), b"x" * 10_000)
    assert accounts.of_memory(first, await accounts.kept_bytes(redis, keys), 0.25)
