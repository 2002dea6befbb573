"""Carrying out what the macro-cycle takes back from training, and gives back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from redis.asyncio import Redis

from collm_common import latency, post
from collm_common.clock import Clock
from collm_common.keys import Keys
from collm_common.messages import Configure, Control, PauseTraining, ResumeTraining
from collm_common.types import BatchSizes, ReplicaState
from collm_dispatcher.cell import Cell
from collm_dispatcher.policy.outlook import Fit
from collm_dispatcher.policy.recall import Steps
from collm_dispatcher.policy.streams import Stream

BEFORE = "before_recall"
REASON = "the dispatcher needs its capacity"


class Recaller:
    """The sizes from before the first step lie beside the present ones, for whoever leads when they come back."""

    def __init__(self, redis: Redis, keys: Keys, cell: Cell, clock: Clock) -> None:
        self._redis, self._keys, self._cell, self._clock = redis, keys, cell, clock

    async def apply(self, steps: Steps, fits: Mapping[str, Fit], stream: Stream | None) -> None:
        """`stream` is the one that b is made for."""
        for id_ in steps.shrink:
            if (sizes := self._sizes(id_)) is not None:
                half = max(1, sizes.train // 2)
                await self._resize(id_, sizes, half, half, self._most(id_, fits, stream, half))
        for id_ in steps.pause:
            await self._say(id_, PauseTraining())
            if (sizes := self._sizes(id_)) is not None:
                # While it stands still there is no B; the trainer keeps its own for when it goes on.
                await self._resize(id_, sizes, 0, sizes.train, self._most(id_, fits, stream, 0))
        for id_ in steps.resume:
            await self._restore(id_)
            await self._say(id_, ResumeTraining())
        for id_ in steps.stop:
            before, after = ReplicaState.COMBINED, ReplicaState.SERVING
            await self._cell.registry.transition(id_, before, after, f"recall: {REASON}", self._clock.now())

    def _sizes(self, replica: str) -> BatchSizes | None:
        member = self._cell.members.get(replica)
        return member.sizes if member is not None else None

    def _most(self, replica: str, fits: Mapping[str, Fit], stream: Stream | None, train_batch: int) -> int:
        """b beside `train_batch`: by the fit; without one, all that the engine can do once nothing is trained."""
        info, fit = self._cell.members[replica].info, fits[replica]
        freed = msgspec.structs.replace(fit, most=info.infer_batch_max, train_batch=train_batch)
        if stream is not None and freed.model is not None:
            return max(fit.most, freed.mode(stream).b)
        return fit.most if train_batch else info.infer_batch_max

    async def _resize(self, replica: str, sizes: BatchSizes, runs: int, train: int, infer: int) -> None:
        """`runs` is the B that runs beside from now on, `train` the one its trainer is told."""
        key = self._keys.config(replica)
        await self._redis.hsetnx(key, BEFORE, msgspec.json.encode(sizes))
        now = msgspec.structs.replace(sizes, train=runs, infer=infer)
        await latency.save_sizes(self._redis, self._keys, replica, now, REASON)
        await self._say(replica, Configure(sizes=msgspec.structs.replace(now, train=train)))

    async def _restore(self, replica: str) -> None:
        key = self._keys.config(replica)
        row: Any = await self._redis.hget(key, BEFORE)
        if row is None:
            return
        sizes = msgspec.json.decode(row, type=BatchSizes)
        await latency.save_sizes(self._redis, self._keys, replica, sizes, "the dispatcher gives it back")
        await self._redis.hdel(key, BEFORE)
        await self._say(replica, Configure(sizes=sizes))

    async def _say(self, replica: str, command: Control) -> None:
        await post.command(self._redis, self._keys, replica, command, "dispatcher")
