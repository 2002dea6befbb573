"""The loop of a service of which one leads, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from collm_common import post, streams
from collm_common.broker import stop_all
from collm_common.clock import SystemClock
from collm_common.errors import FencedError
from collm_common.keys import Keys
from collm_common.lease import Lease
from collm_common.messages import AnyMessage, JobChanged
from collm_common.streams import Entry, Tail
from collm_common.watch import Watch
from tests.support.waiting import eventually

FORMING = JobChanged(job="j1", status="forming", round=0, reason="", time_s=1.0)


class Service:
    """Counts what its loop does; `trouble` is raised by its next tick."""

    def __init__(self, redis: Redis, keys: Keys, holder: str) -> None:
        self.redis, self.keys, self.stop = redis, keys, asyncio.Event()
        self.led = self.ticks = 0
        self.heard: list[AnyMessage] = []
        self.trouble: Exception | None = None
        lease = Lease(redis, keys, "service", holder, 5.0)
        self.watch = Watch(lease, SystemClock(), 0.02, self._lead, self._hear, self._tick)

    async def _lead(self) -> Tail:
        tail = Tail(self.redis, self.keys.events)
        await tail.start()
        self.led += 1
        return tail

    async def _hear(self, _: Entry, message: AnyMessage) -> None:
        self.heard.append(message)

    async def _tick(self, _: float) -> None:
        self.ticks += 1
        trouble, self.trouble = self.trouble, None
        if trouble is not None:
            raise trouble


@asynccontextmanager
async def running(redis: Redis, keys: Keys, holder: str = "one") -> AsyncIterator[Service]:
    service = Service(redis, keys, holder)
    task = asyncio.create_task(service.watch.run(service.stop))
    try:
        yield service
    finally:
        await stop_all(task)


async def test_a_damaged_entry_costs_nothing_but_itself(redis: Redis, keys: Keys) -> None:
    """A leader that dies of one entry, and its successors after it."""
    async with running(redis, keys) as one:
        await eventually(lambda: one.watch.leads)
        await streams.append(redis, keys.events, "job_changed", "j1", b"no message")
        await post.event(redis, keys, FORMING, "j1")
        await eventually(lambda: one.heard == [FORMING])
        assert one.led == 1


async def test_who_lost_the_lease_and_got_it_back_reads_the_present_again(redis: Redis, keys: Keys) -> None:
    """A leader that slept through another's reign and goes on with what it knew before."""
    async with running(redis, keys) as one:
        await eventually(lambda: one.watch.leads)
        await redis.delete(keys.lease("service"))
        await eventually(lambda: one.led == 2)


async def test_a_fenced_tick_is_not_the_end(redis: Redis, keys: Keys) -> None:
    """A service that ends because another led for a moment."""
    async with running(redis, keys) as one:
        await eventually(lambda: one.ticks > 0)
        one.trouble = FencedError("another leads")
        await eventually(lambda: one.led == 2)
        ticks = one.ticks
        await eventually(lambda: one.ticks > ticks)


async def test_a_leader_that_is_refused_gives_its_place_up(redis: Redis, keys: Keys) -> None:
    """A leader that can do nothing, and keeps the lease that its health is seen by."""
    async with running(redis, keys) as one:
        await eventually(lambda: one.ticks > 0)
        one.trouble = ResponseError("NOPERM this user has no permissions")
        await eventually(lambda: not one.watch.leads)
        async with running(redis, keys, "two") as two:
            await eventually(lambda: two.watch.leads, within_s=2.0)


async def test_a_stopped_leader_gives_its_place_to_the_next_at_once(redis: Redis, keys: Keys) -> None:
    """A successor that has to wait for the lease to run out."""
    async with running(redis, keys) as one:
        await eventually(lambda: one.watch.leads)
        async with running(redis, keys, "two") as two:
            assert not two.watch.leads
            one.stop.set()
            await eventually(lambda: two.watch.leads, within_s=2.0)
        assert not one.watch.leads
