"""What the replicas of a job hand each other through Redis: the clients' updates, and the adapter made of them."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

import msgspec
import torch
from msgspec import Struct
from redis.asyncio import Redis

from collm_common import blobs
from collm_common.broker import patiently
from collm_common.errors import AdapterError
from collm_common.keys import Keys
from collm_common.messages import Aggregate, TrainRound
from collm_common.types import AdapterManifest, AtLeastOne
from collm_replica import adapters
from collm_replica.adapters import Tensors
from collm_replica.finetune.screening import Update

log = logging.getLogger(__name__)

UPDATE_TTL_S = 3600.0
STATE_TTL_S = CANDIDATE_TTL_S = 24 * 3600.0
PATIENCE_S = 60.0


class Uploaded(Struct, frozen=True):
    """The meta of one client's uploaded tensors."""

    samples: AtLeastOne
    steps: AtLeastOne
    manifest: AdapterManifest


class Exchange:
    """`replica` gives and takes; `base_digest` names the weights that all tensors belong to."""

    def __init__(self, redis: Redis, keys: Keys, replica: str, base_digest: str) -> None:
        self._redis, self._keys, self._replica, self._base_digest = redis, keys, replica, base_digest

    async def give(self, task: TrainRound, tensors: Tensors, samples: int, steps: int) -> None:
        """Upload this replica's update of a round, made of `samples` in `steps`. Raises BrokerError."""
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
        meta = msgspec.msgpack.encode(Uploaded(samples, steps, manifest))
        key = self._keys.update(task.job, task.round, self._replica)
        await patiently(lambda: blobs.put(self._redis, key, data, meta, UPDATE_TTL_S), PATIENCE_S)

    async def take(self, task: Aggregate) -> tuple[list[Update], dict[str, str]]:
        """What the clients of a round uploaded, and why not for those whose update is missing, damaged or foreign."""
        updates: list[Update] = []
        refused: dict[str, str] = {}
        for client in task.clients:
            try:
                updates.append(await self._update(task, client))
            except AdapterError as error:
                refused[client] = str(error)
        return updates, refused

    async def state(self, task: Aggregate) -> Tensors:
        """What the aggregation that made the round's parent left behind; nothing if it did not, or it is damaged."""
        key = self._keys.server_state(task.job, task.parent)
        try:
            found = await patiently(partial(blobs.get, self._redis, key), PATIENCE_S)
            return {} if found is None else await asyncio.to_thread(adapters.tensors_of, found[0])
        except AdapterError as error:
            log.error("the server's moments start anew: %s", error)
            return {}

    async def store(self, task: Aggregate, tensors: Tensors, state: Tensors) -> None:
        """Make a candidate version of an adapter, after the `state` that goes with it. Raises BrokerError.

        It expires unless it is published.
        """
        if state:
            kept = await asyncio.to_thread(adapters.encode, state, torch.float32)
            name = self._keys.server_state(task.job, task.version)
            await patiently(lambda: blobs.put(self._redis, name, kept, b"state", STATE_TTL_S), PATIENCE_S)
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
        await patiently(lambda: blobs.put(self._redis, key, data, meta, CANDIDATE_TTL_S), PATIENCE_S)

    async def _update(self, task: Aggregate, client: str) -> Update:
        key = self._keys.update(task.job, task.round, client)
        found = await patiently(partial(blobs.get, self._redis, key), PATIENCE_S)
        if found is None:
            raise AdapterError("the update is not there")
        try:
            about = msgspec.msgpack.decode(found[1], type=Uploaded)
        except msgspec.DecodeError as error:
            raise AdapterError(f"the update's manifest is damaged: {error}") from error
        if about.manifest.base_digest != self._base_digest:
            trained, own = about.manifest.base_digest[:12], self._base_digest[:12]
            raise AdapterError(f"it was trained on base {trained}, not {own}")
        tensors = await asyncio.to_thread(adapters.decode, found[0], about.manifest)
        return Update(client, tensors, about.samples, about.steps, about.manifest.alpha / about.manifest.rank)
