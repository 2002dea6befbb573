"""Carrying out what the macro-cycle takes back from training, and gives back."""

from __future__ import annotations

import logging
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

log = logging.getLogger(__name__)
REMEMBERED_S = 86_400.0
REASON = "the dispatcher needs its capacity"


class Recaller:
    """The sizes from before the first step lie in Redis, for whoever leads when training gets them back."""

    def __init__(self, redis: Redis, keys: Keys, cell: Cell, clock: Clock) -> None:
        self._redis, self._keys, self._cell, self._clock = redis, keys, cell, clock

    async def apply(self, steps: Steps, fits: Mapping[str, Fit], stream: Stream | None) -> None:
        """`stream` is the one that b is made for."""
        for id_ in steps.shrink:
            await self._resize(id_, fits[id_], stream, pauses=False)
        for id_ in steps.pause:
            await self._say(id_, PauseTraining())
            await self._resize(id_, fits[id_], stream, pauses=True)
        for id_ in steps.resume:
            await self._restore(id_)
            await self._say(id_, ResumeTraining())
        for id_ in steps.stop:
            before, after = ReplicaState.COMBINED, ReplicaState.SERVING
            await self._cell.registry.transition(id_, before, after, f"recall: {REASON}", self._clock.now())
            await self._redis.delete(self._keys.recall(id_))

    async def _resize(self, replica: str, fit: Fit, stream: Stream | None, *, pauses: bool) -> None:
        """Half of B, or none: while it stands still there is no B, but its trainer keeps its own for later."""
        member = self._cell.members.get(replica)
        if member is None or member.sizes is None:
            return
        sizes = member.sizes
        half = max(1, sizes.train // 2)
        runs, told = (0, sizes.train) if pauses else (half, half)
        await self._redis.set(
            self._keys.recall(replica), msgspec.json.encode(sizes), nx=True, px=round(1000 * REMEMBERED_S)
        )
        infer = _most(fit, member.info.infer_batch_max, stream, runs)
        now = msgspec.structs.replace(sizes, train=runs, infer=infer)
        await latency.save_sizes(self._redis, self._keys, replica, now, REASON)
        await self._say(replica, Configure(sizes=msgspec.structs.replace(now, train=told)))

    async def _restore(self, replica: str) -> None:
        row: Any = await self._redis.get(self._keys.recall(replica))
        if row is None:
            return
        try:
            sizes = msgspec.json.decode(row, type=BatchSizes)
        except msgspec.DecodeError as error:
            log.error("sizes of %s before its recall: %s", replica, error)
        else:
            await self._give(replica, sizes)
        await self._redis.delete(self._keys.recall(replica))

    async def _give(self, replica: str, sizes: BatchSizes) -> None:
        await latency.save_sizes(self._redis, self._keys, replica, sizes, "the dispatcher gives it back")
        await self._say(replica, Configure(sizes=sizes))

    async def _say(self, replica: str, command: Control) -> None:
        await post.command(self._redis, self._keys, replica, command, "dispatcher")


def _most(fit: Fit, engine_most: int, stream: Stream | None, train_batch: int) -> int:
    """b beside `train_batch`: by the fit; without one, all that the engine can do once nothing is trained."""
    if stream is None or fit.model is None:
        return fit.most if train_batch else engine_most
    freed = msgspec.structs.replace(fit, most=engine_most, train_batch=train_batch)
    return max(fit.most, freed.mode(stream).b)
