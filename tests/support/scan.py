"""Looking for a text in everything a broker holds."""

from __future__ import annotations

from redis.asyncio import Redis


async def assert_not_in_redis(redis: Redis, text: bytes) -> None:
    """Look into every key of every type."""
    seen = 0
    async for key in redis.scan_iter(count=1000):
        kind = (await redis.type(key)).decode()
        if kind == "stream":
            values = [value for _, row in await redis.xrange(key) for value in row.values()]
        elif kind == "hash":
            values = list((await redis.hgetall(key)).values())
        elif kind == "set":
            values = list(await redis.smembers(key))
        else:
            values = [await redis.get(key)]
        seen += len(values)
        assert text not in key
        assert not any(text in value for value in values), key
    assert seen > 50
