"""Looking back at streams that others write, in a real broker."""

from __future__ import annotations

from redis.asyncio import Redis

from collm_common import post
from collm_common.keys import Keys
from collm_common.lookback import Recent, queues, subflows
from collm_common.messages import ReplicaChanged
from collm_common.streams import append


def said(number: int) -> ReplicaChanged:
    return ReplicaChanged(replica="r1", what="up", reason=str(number), time_s=float(number))


async def tell(redis: Redis, keys: Keys, *numbers: int) -> None:
    for number in numbers:
        await post.event(redis, keys, said(number), "r1")


async def test_only_what_is_new_is_read_again(redis: Redis, keys: Keys) -> None:
    """Messages shown twice, missed between two looks, or read anew from the start at each."""
    recent = Recent(redis, keys.events, keep=5)
    await recent.catch_up()
    assert list(recent.messages) == []
    await tell(redis, keys, 1, 2)
    await recent.catch_up()
    await recent.catch_up()
    await tell(redis, keys, 3)
    await recent.catch_up()
    assert list(recent.messages) == [said(1), said(2), said(3)]


async def test_no_more_than_the_last_ones_are_kept(redis: Redis, keys: Keys) -> None:
    """Memory, or one reply of the broker, that grows with what was missed."""
    recent = Recent(redis, keys.events, keep=3)
    await tell(redis, keys, *range(4))
    await recent.catch_up()
    await tell(redis, keys, *range(4, 12))
    await recent.catch_up()
    assert list(recent.messages) == [said(9), said(10), said(11)]


async def test_a_damaged_entry_hides_nothing_else(redis: Redis, keys: Keys) -> None:
    """A view that stays blank because somebody wrote rubbish."""
    await tell(redis, keys, 1)
    await append(redis, keys.events, "state_changed", "x", b"rubbish")
    await redis.xadd(keys.events, {"other": "fields"})
    await tell(redis, keys, 2)
    recent = Recent(redis, keys.events, keep=10)
    await recent.catch_up()
    assert list(recent.messages) == [said(1), said(2)]


async def test_damaged_keys_cost_only_what_they_hold(redis: Redis, keys: Keys) -> None:
    """A page and a status command that fail for good because of one key, and go on failing once it is repaired."""
    for key in (keys.events, keys.requests("m", "a"), keys.subflow("r1")):
        await redis.set(key, "x")
    await redis.sadd(keys.streams, "m|a", "m|b", b"\xff|b")
    await append(redis, keys.requests("m", "b"), "request", "x", b"")
    recent = Recent(redis, keys.events, keep=5)
    await recent.catch_up()
    assert [(queue.slo, queue.length) for queue in await queues(redis, keys)] == [("a", 0), ("b", 1)]
    assert await subflows(redis, keys, ["r1", "r2"]) == {"r1": 0, "r2": 0}
    await redis.set(keys.streams, "x")
    assert await queues(redis, keys) == []
    await redis.delete(keys.events)
    await tell(redis, keys, 1)
    await recent.catch_up()
    assert list(recent.messages) == [said(1)]


async def test_lengths_belong_to_their_names(redis: Redis, keys: Keys) -> None:
    """A queue shown under the name of its neighbour."""
    await redis.sadd(keys.streams, "m|b", "m|a")
    await append(redis, keys.requests("m", "b"), "request", "x", b"")
    await append(redis, keys.subflow("r2"), "request", "x", b"")
    assert [(queue.slo, queue.length) for queue in await queues(redis, keys)] == [("a", 0), ("b", 1)]
    assert await subflows(redis, keys, ["r1", "r2"]) == {"r1": 0, "r2": 1}
    assert await subflows(redis, keys, []) == {}
