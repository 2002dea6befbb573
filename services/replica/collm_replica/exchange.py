"""What the replicas of a job hand each other through Redis: the clients' updates, and the adapter made of them."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from msgspec import Struct
from redis.asyncio import Redis

from collm_common import blobs
from collm_common.broker import patiently
from collm_common.errors import AdapterError
from collm_common.keys import Keys
from collm_common.messages import Aggregate, TrainRound
from collm_common.types import AdapterManifest
from collm_replica import adapters
from collm_replica.adapters import Tensors

UPDATE_TTL_S = 3600.0
PATIENCE_S = 60.0


class Update(Struct, frozen=True):
    """The meta of one client's uploaded tensors."""

    samples: int
    manifest: AdapterManifest


class Exchange:
    """`replica` gives and takes; `base_digest` names the weights that all tensors belong to."""

    def __init__(self, redis: Redis, keys: Keys, replica: str, base_digest: str) -> None:
        self._redis, self._keys, self._replica, self._base_digest = redis, keys, replica, base_digest

    async def give(self, task: TrainRound, tensors: Tensors, samples: int) -> None:
        """Upload this replica's update of a round. Raises BrokerError."""
        data = await asyncio.to_thread(adapters.encode, tensors)
        manifest = adapters.manifest(
            data,
            tensors,
            name=task.adapter,
            version=task.start + 1,
            base_digest=self._base_digest,
            alpha=task.hyper.alpha,
            parent=task.start,
            job=task.job,
        )
        meta = msgspec.msgpack.encode(Update(samples, manifest))
        key = self._keys.update(task.job, task.round, self._replica)
        await patiently(lambda: blobs.put(self._redis, key, data, meta, UPDATE_TTL_S), PATIENCE_S)

    async def take(self, task: Aggregate) -> list[tuple[Tensors, int]]:
        """(tensors, samples) of every client of a round. Raises AdapterError if one is missing or damaged."""
        return [await self._update(task, client) for client in task.clients]

    async def store(self, task: Aggregate, tensors: Tensors) -> None:
        """Make a candidate version of an adapter. Raises BrokerError."""
        data = await asyncio.to_thread(adapters.encode, tensors)
        manifest = adapters.manifest(
            data,
            tensors,
            name=task.adapter,
            version=task.version,
            base_digest=self._base_digest,
            alpha=task.hyper.alpha,
            parent=task.parent,
            job=task.job,
        )
        key, meta = self._keys.adapter_version(task.adapter, task.version), msgspec.msgpack.encode(manifest)
        await patiently(lambda: blobs.put(self._redis, key, data, meta), PATIENCE_S)

    async def _update(self, task: Aggregate, client: str) -> tuple[Tensors, int]:
        key = self._keys.update(task.job, task.round, client)
        found = await patiently(partial(blobs.get, self._redis, key), PATIENCE_S)
        if found is None:
            raise AdapterError(f"the update of {client} is not there")
        try:
            update = msgspec.msgpack.decode(found[1], type=Update)
        except msgspec.DecodeError as error:
            raise AdapterError(f"the manifest of the update of {client} is damaged: {error}") from error
        return await asyncio.to_thread(adapters.decode, found[0], update.manifest), update.samples
