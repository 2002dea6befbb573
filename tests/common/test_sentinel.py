"""The broker changes places: a real primary, its copy, and a real Sentinel."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from collm_common import streams
from collm_common.broker import connect, connection, patiently, stop_all
from collm_common.clock import SystemClock
from collm_common.errors import SettingsError
from collm_common.retry import forever
from collm_common.sentinel import Watched as Url
from collm_common.streams import AckPolicy, Entry, WorkQueue
from tests.support.sentinel import Watched
from tests.support.waiting import eventually

STREAM = "{collm}:work"


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    """All three run."""
    running = Watched(tmp_path)
    try:
        await asyncio.to_thread(running.start)
        yield running
    finally:
        running.close()


@pytest.mark.parametrize("killed", [True, False], ids=["the primary is killed", "the primary still lives"])
async def test_work_goes_on_at_the_new_primary(watched: Watched, killed: bool) -> None:
    """A service that keeps to a broker which is gone, or whose writes will be lost, until it is started again."""
    seen: list[str] = []
    async with connection(watched.url) as redis, connection(watched.url) as own, connection(watched.copy.url) as copy:
        work = WorkQueue(own, STREAM, "g", "c", AckPolicy.ON_SUCCESS)

        async def handle(entry: Entry) -> None:
            seen.append(entry.id)

        async def step() -> None:
            await work.create()
            await work.handle(handle, count=1)

        async def moved() -> bool:
            word = os.urandom(8)
            await patiently(lambda: redis.set("there", word), 30.0)
            return bool(await copy.get("there") == word)

        task = asyncio.create_task(forever("work", step, SystemClock()))
        try:
            assert await redis.get("there") == b"before"
            await streams.append(redis, STREAM, "k", "first", b"x")
            await eventually(lambda: seen == ["first"])
            if killed:
                watched.primary.stop(signal.SIGKILL)
            else:
                await asyncio.to_thread(watched.name_the_copy)
            await eventually(moved, within_s=40)
            await patiently(lambda: streams.append(redis, STREAM, "k", "second", b"x"), 30.0)
            await eventually(lambda: "second" in seen, within_s=40)
        finally:
            await stop_all(task)


def test_a_url_of_sentinels_says_who_is_who() -> None:
    """The Sentinels' password given to the broker, or the broker's to the Sentinels."""
    found = Url.of("redis+sentinel://user:p%40ss@one:1,[::2]:3,three/cell/4?password=theirs")
    assert found.sentinels == (("one", 1), ("::2", 3), ("three", 26379))
    assert (found.name, found.sentinel) == ("cell", {"password": "theirs"})
    assert found.primary == {"username": "user", "password": "p@ss", "db": 4}


@pytest.mark.parametrize("url", ["//one:1", "///cell", "//one:1/cell/x", "//one:x/cell", "//one/cell?db=1", "//,/cell"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    """A typing error that looks like a broker which is away."""
    with pytest.raises(SettingsError, match=r"COLLM_REDIS_URL.*(Sentinel|[Pp]ort)"):
        connect(f"redis+sentinel:{url}")
