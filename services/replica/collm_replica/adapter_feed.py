"""Adapter versions out of Redis, checked and ready for the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from msgspec import Struct
from redis.asyncio import Redis

from collm_common import blobs
from collm_common.errors import AdapterError
from collm_common.keys import Keys
from collm_common.types import AdapterManifest, AdapterRef
from collm_replica.engine.protocol import Tensors

log = logging.getLogger(__name__)

Decode = Callable[[bytes, AdapterManifest], Tensors]


class Loaded(Struct, frozen=True):
    """One version in memory."""

    ref: AdapterRef
    tensors: Tensors
    rank: int
    alpha: float


class AdapterFeed:
    """Reads `adapter:{name}` and its versions. `decode` turns checked bytes into tensors."""

    def __init__(self, redis: Redis, keys: Keys, base_digest: str, decode: Decode) -> None:
        self._redis, self._keys, self._base_digest, self._decode = redis, keys, base_digest, decode

    async def current(self, name: str) -> int | None:
        """The current version of `name`; 0 is the untrained base model, None an unknown or damaged adapter."""
        version = await self._redis.hget(self._keys.adapter(name), "version")
        if version is not None and not version.isdigit():
            log.error("adapter %s is damaged: its version is %r", name, version)
            return None
        return None if version is None else int(version)

    async def names(self, model: str) -> list[str]:
        """All adapters of `model`, oldest name order."""
        names = sorted(name.decode(errors="replace") for name in await self._redis.smembers(self._keys.adapters))
        models = [await self._redis.hget(self._keys.adapter(name), "model") for name in names]
        return [name for name, of in zip(names, models, strict=True) if of == model.encode()]

    async def fetch(self, name: str, version: int) -> Loaded:
        """Raises AdapterError if the version is not there, was trained on other weights, or is damaged."""
        found = await blobs.get(self._redis, self._keys.adapter_version(name, version))
        if found is None:
            raise AdapterError(f"adapter {name} has no version {version}")
        data, meta = found
        try:
            manifest = msgspec.msgpack.decode(meta, type=AdapterManifest)
        except msgspec.DecodeError as error:
            raise AdapterError(f"the manifest of adapter {name}@v{version} is damaged: {error}") from error
        if self._base_digest and manifest.base_digest != self._base_digest:
            trained, served = manifest.base_digest[:12], self._base_digest[:12]
            raise AdapterError(f"adapter {name}@v{version} was trained on base {trained}, not {served}")
        tensors = await asyncio.to_thread(self._decode, data, manifest)
        return Loaded(AdapterRef(name, str(version)), tensors, manifest.rank, manifest.alpha)
