"""A replica among damaged keys."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from collm_common.clock import ManualClock
from collm_common.keys import Keys
from collm_common.registry import Registry
from collm_replica.channel import Ready
from collm_replica.presence import Presence
from tests.replica.support import settings

READY = Ready(base_digest="", context_tokens=64, infer_batch_max=4)


async def test_a_replica_comes_up_and_goes_down_among_damaged_keys(redis: Redis, keys: Keys) -> None:
    """A supervisor that ends, or waits for ten minutes, because of one key; one that repairs nothing of its own."""
    presence, registry = Presence(settings(), redis, ManualClock()), Registry(redis, keys)
    await redis.set(keys.events, "x")
    for step in (presence.up(READY, ""), presence.down("test"), presence.up(READY, "")):
        await redis.set(keys.replica("r1"), "x")
        await redis.set(keys.subflow("r1"), "x")
        await asyncio.wait_for(step, 10)
        info = await registry.replica("r1")
        assert info is not None
        assert presence.info is not None
        assert info.ready is presence.info.ready
    await presence.down("test")
    assert await redis.exists(keys.subflow("r1")) == 0
    await presence.leave()
    assert await registry.replicas() == {}
