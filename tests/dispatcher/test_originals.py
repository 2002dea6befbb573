"""Original streams: bounded over the whole cell, found by the dispatch loop, removed when nobody uses them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection

import pytest
from redis.asyncio import Redis

from collm_common.errors import FencedError, InvalidRequest, Overloaded
from collm_common.keys import Keys
from collm_common.lease import Lease
from collm_common.messages import Done
from collm_common.types import Slo
from collm_dispatcher.dispatch import Dispatch
from collm_dispatcher.originals import Bounds, Originals
from tests.dispatcher.support import dispatcher, replica
from tests.replica.support import replies, request
from tests.support.waiting import eventually

BOUNDS = Bounds(max_queued=3, max_streams=2, retry_after_s=1.0)


async def test_a_stream_is_bounded_whoever_appends(redis: Redis, keys: Keys) -> None:
    """A bound for each ingress: two of them let in twice as many requests as the operator allowed."""
    two = Originals(redis, keys), Originals(redis, keys)
    tries = [two[n % 2].append([request(f"q{n}")], BOUNDS) for n in range(20)]
    refused = [error for error in await asyncio.gather(*tries, return_exceptions=True) if not isinstance(error, list)]
    assert [type(error) for error in refused] == [Overloaded] * 17
    assert {error.retry_after_s for error in refused if isinstance(error, Overloaded)} == {1.0}
    await two[0].append([request("again", attempt=1)])
    assert await redis.xlen(keys.requests("m", "s")) == 4


async def test_choices_of_one_answer_are_appended_together_or_not_at_all(redis: Redis, keys: Keys) -> None:
    """Half of the choices in a full queue, served for a client that was refused."""
    originals = Originals(redis, keys)
    three = [request(f"q{n}") for n in range(3)]
    assert len(await originals.append(three[:1], BOUNDS)) == 1
    with pytest.raises(Overloaded):
        await originals.append(three, BOUNDS)
    ids = await originals.append(three[1:], BOUNDS)
    assert [row[0].decode() for row in await redis.xrange(keys.requests("m", "s"))][1:] == ids


async def test_clients_make_only_so_many_streams_whoever_appends(redis: Redis, keys: Keys) -> None:
    """Two ingresses that both find one place left."""
    originals = Originals(redis, keys)
    tries = [originals.append([request(f"q{n}", slo=Slo(f"s{n}"))], BOUNDS, configured=False) for n in range(10)]
    found = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(isinstance(one, list) for one in found) == 2
    assert all(isinstance(one, list | InvalidRequest) for one in found)
    await originals.append([request("class", slo=Slo("gold"))], BOUNDS)
    assert await redis.scard(keys.streams) == 3


async def test_a_stream_with_an_entry_is_always_in_the_set(redis: Redis, keys: Keys) -> None:
    """A request that arrives while its stream is removed, and that nobody looks for."""
    chance, originals = random.Random(7), Originals(redis, keys)
    lease = Lease(redis, keys, "dispatch:m", "d1", 60)
    token = await lease.hold()
    assert token is not None
    removed = 0
    for step in range(400):
        key, slo = keys.requests("m", "s"), request().slo
        match chance.randrange(4):
            case 0 | 1:
                await asyncio.gather(
                    originals.append([request(f"q{step}")]), originals.prune(lease.key, token, "m", slo.name)
                )
            case 2:
                removed += await originals.prune(lease.key, token, "m", slo.name)
            case 3:
                await redis.xtrim(key, 0, approximate=False)
        assert not await redis.xlen(key) or await redis.sismember(keys.streams, "m|s")
    assert removed > 20


async def test_who_leads_no_more_removes_nothing(redis: Redis, keys: Keys) -> None:
    """A leader that slept and takes a stream away from under the next one."""
    originals = Originals(redis, keys)
    await originals.announce("m", "s")
    with pytest.raises(FencedError):
        await originals.prune(keys.lease("dispatch:m"), "old#1.1.1", "m", "s")
    assert await redis.smembers(keys.streams) == {b"m|s"}


async def test_unused_streams_go_and_no_request_with_them(redis: Redis, keys: Keys) -> None:
    """A place among the streams, a key and a reader for each objective that a client ever thought of."""
    originals, chance = Originals(redis, keys), random.Random(11)
    names = [f"q{n}" for n in range(150)]
    async with replica(redis, keys), dispatcher(redis, stream_idle_s=0.02, refresh_s=0.01) as running:
        await originals.announce("m", "default")
        for name in names:
            await originals.append([request(name, slo=Slo(f"ttft{chance.randrange(12)}"))])
            await asyncio.sleep(chance.random() * 0.02)

        async def answered() -> bool:
            done = [reply.id for reply in await replies(redis, keys) if isinstance(reply, Done)]
            return sorted(done) == sorted(names)

        await eventually(answered)

        async def gone() -> bool:
            return bool(await redis.smembers(keys.streams) == {b"m|default"})

        await eventually(gone)
        await eventually(lambda: len(_readers(running)) == 1)
    assert await redis.keys(keys.requests("m", "ttft*")) == []


def _readers(running: Dispatch) -> Collection[str]:
    term = running.leaders["m"].term
    return term.backlog._readers if term is not None else ()
