"""Keys that somebody damaged: whatever else there is goes on."""

from __future__ import annotations

from functools import partial

import pytest
from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.keys import Keys
from collm_common.messages import Cancel, Lost
from collm_common.types import Slo
from tests.dispatcher.support import dispatcher, offer, register, replica
from tests.replica.support import replies, request
from tests.support.waiting import eventually


async def _answered(redis: Redis, keys: Keys, id_: str) -> bool:
    return any(reply.id == id_ for reply in await replies(redis, keys))


@pytest.mark.parametrize("kind", ["string", "fields", "members"])
async def test_damaged_keys_stop_no_other_request(redis: Redis, keys: Keys, kind: str) -> None:
    """A dispatcher that dies of one wrong key, again and again, for all models."""
    names = (keys.replica("r2"), keys.config("r1"), keys.latency("r1"), keys.adapter("desk"))
    await redis.sadd(keys.replicas, "r2")
    await redis.sadd(keys.adapters, "desk")
    for name in names:
        if kind == "string":
            await redis.set(name, "x")
        elif kind == "fields":
            fields = {"state": "asleep", "train": "x", "infer": b"\xff", "model": b"\xff", "version": "x"}
            await redis.hset(name, mapping=fields)
    if kind == "members":
        for set_ in (keys.replicas, keys.adapters, keys.streams):
            await redis.sadd(set_, b"\xff", "", "no bar")
    async with replica(redis, keys), dispatcher(redis) as running:
        await offer(redis, keys, request("q1"))
        await eventually(lambda: _answered(redis, keys, "q1"))
        assert all(not task.done() for task in running.tasks)


async def test_garbage_in_every_stream_is_removed(redis: Redis, keys: Keys) -> None:
    """Entries that nobody can read and that fill a stream or a batch for ever, or kill who reads them."""
    await offer(redis, keys, request("q1"))
    cancel = messages.encode(Cancel(id="q1"))
    for key in (keys.requests("m", "s"), keys.subflow("r1")):
        await redis.xadd(key, {"junk": b"\xff"})
        await redis.xadd(key, streams.fields("request", "x", b"\xff"))
        await redis.xadd(key, streams.fields("request", "x", cancel) | {"kind": b"\xff"})
    async with replica(redis, keys), dispatcher(redis):
        await eventually(lambda: _answered(redis, keys, "q1"))
        for key in (keys.requests("m", "s"), keys.subflow("r1")):
            await eventually(partial(_is_empty, redis, key))


async def test_a_stream_of_a_wrong_type_costs_only_its_own_requests(redis: Redis, keys: Keys) -> None:
    """One class of requests that takes all others with it."""
    await redis.set(keys.requests("other", "s"), "x")
    await redis.sadd(keys.streams, "other|s")
    async with replica(redis, keys), dispatcher(redis) as running:
        await eventually(lambda: "other" in running.leaders)
        await offer(redis, keys, request("q1"))
        await eventually(lambda: _answered(redis, keys, "q1"))


@pytest.mark.parametrize("lease_s", [60.0, 0.05])
async def test_a_damaged_subflow_costs_only_its_replica(redis: Redis, keys: Keys, lease_s: float) -> None:
    """One replica, alive or dead, whose key of a wrong type stops the releases to all others."""
    await register(redis, keys, "r0", lease_s=lease_s)
    await redis.set(keys.subflow("r0"), "x")
    async with replica(redis, keys, "r1"), dispatcher(redis):
        await offer(redis, keys, request("q1"))
        await eventually(lambda: _answered(redis, keys, "q1"))


async def test_a_stream_that_is_damaged_under_the_leader_stops_no_other(redis: Redis, keys: Keys) -> None:
    """Requests that were read from a key which is none any more, at the head of the queue for ever."""
    await offer(redis, keys, request("q1", slo=Slo("bad"), deadline_s=1.0))
    async with dispatcher(redis) as running:
        await eventually(lambda: running.leaders and running.leaders["m"].held == 1)
        await redis.set(keys.requests("m", "bad"), "x")
        async with replica(redis, keys):
            await offer(redis, keys, request("q2"))
            await eventually(lambda: _answered(redis, keys, "q2"))


async def test_damaged_replies_of_one_ingress_cost_the_others_nothing(redis: Redis, keys: Keys) -> None:
    """An inference process that ends, and loads its model again, because of a key of one ingress."""
    await redis.set(keys.replies("i2"), "x")
    async with replica(redis, keys), dispatcher(redis):
        await offer(redis, keys, request("q1", ingress="i2"), request("q2"))
        await eventually(lambda: _answered(redis, keys, "q2"))
        await eventually(partial(_is_empty, redis, keys.subflow("r1")))
        await offer(redis, keys, request("q3"))
        await eventually(lambda: _answered(redis, keys, "q3"))


async def test_requests_of_a_replica_that_died_while_it_was_not_ready_go_back(redis: Redis, keys: Keys) -> None:
    """A replica killed in the middle of its drain, whose clients wait until they give up."""
    await register(redis, keys, "r1", lease_s=0.05, ready=False)
    await register(redis, keys, "r2")
    message = request("q1")
    await streams.append(redis, keys.subflow("r1"), "request", "q1", messages.encode(message))
    await redis.xadd(keys.subflow("r1"), streams.fields("cancel", "q1", messages.encode(Cancel(id="q1"))))
    await redis.sadd(keys.streams, "m|s")
    async with dispatcher(redis):
        await eventually(lambda: _answered(redis, keys, "q1"))
    assert await replies(redis, keys) == [Lost(id="q1", attempt=0)]
    assert await redis.xlen(keys.subflow("r1")) == 0


async def _is_empty(redis: Redis, key: str) -> bool:
    return int(await redis.xlen(key)) == 0
