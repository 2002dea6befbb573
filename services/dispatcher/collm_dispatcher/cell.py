"""One view of the cell, read again every moment: replicas, the batch sizes chosen for them, adapters."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from msgspec import Struct
from redis.asyncio import Redis

from collm_common.broker import AWAY
from collm_common.clock import Clock, ticks
from collm_common.keys import Keys
from collm_common.registry import Registry
from collm_common.types import ReplicaInfo, ReplicaState

log = logging.getLogger(__name__)


class Member(Struct, frozen=True):
    """A replica with the coordinator's cap on its running batch (None: none was set)."""

    info: ReplicaInfo
    cap: int | None = None

    @property
    def usable(self) -> bool:
        """Alive, and its inference process made a real step."""
        return self.info.alive and self.info.ready

    @property
    def takes_requests(self) -> bool:
        """Usable and not Idle."""
        return self.usable and self.info.state is not ReplicaState.IDLE


class Adapter(Struct, frozen=True):
    """The current version of an adapter of a model; 0 is the base model until it is trained."""

    model: str
    version: int


class Cell:
    """The last view. `steady_since_s` (monotonic) is when the broker was last found again after it was away."""

    def __init__(self, redis: Redis, keys: Keys, clock: Clock) -> None:
        self.redis, self.keys, self.clock = redis, keys, clock
        self.registry = Registry(redis, keys)
        self.members: Mapping[str, Member] = {}
        self.adapters: Mapping[str, Adapter] = {}
        self.reachable = False
        self.steady_since_s = clock.monotonic()

    def of(self, model: str) -> list[Member]:
        """The replicas of a model."""
        return [member for member in self.members.values() if member.info.model == model]

    async def refresh(self) -> None:
        """Read everything again."""
        replicas = await self.registry.replicas()
        names = sorted(name.decode() for name in await self.redis.smembers(self.keys.adapters))
        async with self.redis.pipeline(transaction=False) as pipe:
            for id_ in replicas:
                pipe.hget(self.keys.config(id_), "infer")
            for name in names:
                pipe.hmget(self.keys.adapter(name), "model", "version")
            replies = await pipe.execute()
        caps, rows = replies[: len(replicas)], replies[len(replicas) :]
        self.members = {
            id_: Member(info, int(cap) if cap else None)
            for (id_, info), cap in zip(replicas.items(), caps, strict=True)
        }
        self.adapters = {
            name: Adapter(row[0].decode(), int(row[1] or 0)) for name, row in zip(names, rows, strict=True) if row[0]
        }

    async def run(self, every_s: float) -> None:
        """Refresh for ever."""
        async for _ in ticks(every_s, self.clock):
            try:
                await self.refresh()
            except AWAY as error:
                if self.reachable:
                    log.warning("registry: broker away: %s", error)
                self.reachable = False
                continue
            if not self.reachable:
                self.reachable, self.steady_since_s = True, self.clock.monotonic()
