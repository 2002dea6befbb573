"""Big values as hashes of 1 MB chunks: one long command would stall the broker for everyone."""

from __future__ import annotations

import hashlib
from typing import Any

from redis.asyncio import Redis

from collm_common.errors import AdapterError

CHUNK_BYTES = 1 << 20
MAX_BLOB_BYTES = 4 << 30


async def put(redis: Redis, key: str, data: bytes, meta: bytes, ttl_s: float | None = None) -> None:
    """Store `data` with its `meta` (written last: a blob with meta is whole). Overwrites.

    With `ttl_s` a part that a killed writer leaves behind expires too.
    """
    if len(data) > MAX_BLOB_BYTES:
        raise AdapterError(f"blob {key} has {len(data)} bytes, over the limit of {MAX_BLOB_BYTES}")
    await redis.delete(key)
    for start in range(0, len(data), CHUNK_BYTES):
        await _set(redis, key, {f"chunk:{start // CHUNK_BYTES}": data[start : start + CHUNK_BYTES]}, ttl_s)
    about = {"meta": meta, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    await _set(redis, key, about, ttl_s)


async def _set(redis: Redis, key: str, fields: dict[str, Any], ttl_s: float | None) -> None:
    async with redis.pipeline(transaction=True) as pipe:
        pipe.hset(key, mapping=fields)
        if ttl_s is not None:
            pipe.pexpire(key, round(ttl_s * 1000))
        await pipe.execute()


async def meta(redis: Redis, key: str) -> bytes | None:
    """The blob's meta, or None if there is no whole blob."""
    reply: bytes | None = await redis.hget(key, "meta")
    return reply


async def get(redis: Redis, key: str) -> tuple[bytes, bytes] | None:
    """(data, meta), checked against the stored digest; None if absent. Raises AdapterError if it is damaged."""
    size, digest, about = await redis.hmget(key, ["bytes", "sha256", "meta"])
    if size is None or digest is None or about is None:
        return None
    if not size.isdigit() or int(size) > MAX_BLOB_BYTES:
        raise AdapterError(f"blob {key} is damaged: its size is {size!r}")
    chunks = [await redis.hget(key, f"chunk:{i}") for i in range(-(-int(size) // CHUNK_BYTES))]
    data = b"".join(bytes(chunk) for chunk in chunks if chunk is not None)
    if len(data) != int(size) or hashlib.sha256(data).hexdigest().encode() != digest:
        raise AdapterError(f"blob {key} is damaged: {len(data)} of {int(size)} bytes, or a wrong sha256")
    return data, about
