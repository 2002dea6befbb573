"""Adapter versions that clients bring or take away, in Redis."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from redis.asyncio import Redis

from collm_common import blobs, post
from collm_common.errors import Conflict
from collm_common.keys import Keys
from collm_common.lease import Lease
from collm_common.lineage import Turn, queue_turn
from collm_common.messages import AdapterPublished, LoadAdapter, UnloadAdapter
from collm_common.trouble import contained, written
from collm_common.types import AdapterManifest, AdapterRef
from collm_dispatcher.ingress.peft_folder import OutsideAdapter


class AdapterStore:
    """A name's hash stays when it is unloaded, for a version number never means two things."""

    def __init__(self, redis: Redis, keys: Keys, alone_s: float) -> None:
        """One change of a name at a time; one that takes longer than `alone_s` seconds may meet another."""
        self._redis, self._keys, self._alone_s = redis, keys, alone_s

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[None]:
        """Raises Conflict while somebody else changes the adapter, or a job trains it."""
        lease = Lease(self._redis, self._keys, f"change/{name}", uuid.uuid4().hex, self._alone_s)
        if await lease.hold() is None:
            raise Conflict(f"adapter {name!r} is being changed at this moment", param="lora_name")
        try:
            for job in written(self._keys.jobs, await self._redis.smembers(self._keys.jobs)):
                trains, key = None, self._keys.job(job)
                with contained(key):
                    trains = await self._redis.hget(key, "adapter")
                if trains == name.encode():
                    raise Conflict(f"adapter {name!r} is being trained by {job}", param="lora_name")
            yield
        finally:
            await lease.release()

    async def known(self, name: str) -> bool:
        """Whether the name stands for an adapter now."""
        return bool(await self._redis.sismember(self._keys.adapters, name))

    async def put(self, name: str, base_digest: str, adapter: OutsideAdapter) -> AdapterRef:
        """As the next version, which is forgotten unless it is published within the time alone. Raises AdapterError."""
        counts = await self._redis.hmget(self._keys.adapter(name), ["version", "last"])
        version = max([int(count) for count in counts if count is not None and count.isdigit()], default=0) + 1
        while await self._redis.exists(self._keys.adapter_version(name, version)):
            version += 1
        manifest = AdapterManifest(
            name=name,
            version=version,
            base_digest=base_digest,
            rank=adapter.rank,
            alpha=adapter.alpha,
            modules=adapter.modules,
            sha256=hashlib.sha256(adapter.data).hexdigest(),
            size_bytes=len(adapter.data),
        )
        await self._redis.hset(self._keys.adapter(name), "last", version)
        key, meta = self._keys.adapter_version(name, version), msgspec.msgpack.encode(manifest)
        await blobs.put(self._redis, key, adapter.data, meta, self._alone_s)
        return AdapterRef(name, str(version))

    async def drop(self, ref: AdapterRef) -> None:
        """A version that was not published."""
        await self._redis.unlink(self._keys.adapter_version(ref.name, int(ref.version)))

    async def publish(self, ref: AdapterRef, model: str, replicas: Sequence[str], now_s: float) -> None:
        """Make a stored version current for all `replicas`."""
        key, version = self._keys.adapter(ref.name), int(ref.version)
        row, parent = await self._redis.hmget(key, ["published", "version"])
        published = f"{row.decode(errors='replace')},{version}" if row else str(version)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.persist(self._keys.adapter_version(ref.name, version))
            pipe.hset(key, mapping={"model": model, "version": version, "last": version, "published": published})
            pipe.sadd(self._keys.adapters, ref.name)
            for id_ in replicas:
                post.queue_command(pipe, self._keys, id_, LoadAdapter(name=ref.name, version=version), ref.name)
            came = int(parent) if parent is not None and parent.isdigit() else 0
            queue_turn(pipe, self._keys, ref.name, Turn(version, came, now_s, reason="loaded from outside"))
            post.queue_event(pipe, self._keys, AdapterPublished(name=ref.name, version=version, time_s=now_s), ref.name)
            await pipe.execute()

    async def remove(self, name: str, replicas: Sequence[str]) -> None:
        """The name and all its versions; requests that have one keep it to their end."""
        key = self._keys.adapter(name)
        rows = await self._redis.hmget(key, ["published", "version"])
        versions = {
            int(text) for row in rows if row for text in row.decode(errors="replace").split(",") if text.isdecimal()
        }
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.srem(self._keys.adapters, name)
            pipe.hdel(key, "model", "version", "published", "trained_s")
            pipe.hset(key, "last", max(versions, default=0))
            for version in versions:
                pipe.unlink(self._keys.adapter_version(name, version))
            for id_ in replicas:
                post.queue_command(pipe, self._keys, id_, UnloadAdapter(name=name), name)
            await pipe.execute()
