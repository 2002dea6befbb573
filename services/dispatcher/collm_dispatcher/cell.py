"""One view of the cell, read again every moment: replicas, the batch sizes chosen for them, adapters."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from redis.asyncio import Redis

from collm_common.broker import AWAY
from collm_common.clock import Clock, ticks
from collm_common.errors import MessageError
from collm_common.keys import Keys
from collm_common.latency import LatencyModel, read_model, read_sizes
from collm_common.registry import Registry
from collm_common.trouble import TROUBLES, fault, readable
from collm_common.types import BatchSizes, ReplicaInfo, ReplicaState


class Member(Struct, frozen=True):
    """A replica with what the coordinator chose and fitted for it (None: nothing yet)."""

    info: ReplicaInfo
    sizes: BatchSizes | None = None
    latency: LatencyModel | None = None

    @property
    def usable(self) -> bool:
        """Alive, and its inference process made a real step."""
        return self.info.alive and self.info.ready

    @property
    def train_batch(self) -> int:
        """B of the fine-tuning beside it; 0 while there is none."""
        return self.sizes.train if self.sizes is not None and self.info.state is ReplicaState.COMBINED else 0

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
        names = sorted(name.decode(errors="replace") for name in await self.redis.smembers(self.keys.adapters))
        async with self.redis.pipeline(transaction=False) as pipe:
            for id_ in replicas:
                pipe.hgetall(self.keys.config(id_))
            for id_ in replicas:
                pipe.hgetall(self.keys.latency(id_))
            for name in names:
                pipe.hmget(self.keys.adapter(name), "model", "version")
            replies = await pipe.execute(raise_on_error=False)
        count = len(replicas)
        sizes, models, rows = replies[:count], replies[count : 2 * count], replies[2 * count :]
        self.members = {
            id_: Member(info, read_sizes(id_, chosen), read_model(id_, model))
            for (id_, info), chosen, model in zip(replicas.items(), sizes, models, strict=True)
        }
        adapters = {name: readable(_adapter, f"adapter {name}", row) for name, row in zip(names, rows, strict=True)}
        self.adapters = {name: adapter for name, adapter in adapters.items() if adapter is not None}

    async def run(self, every_s: float) -> None:
        """Refresh for ever."""
        async for _ in ticks(every_s, self.clock):
            try:
                await self.refresh()
            except AWAY as error:
                if self.reachable or fault(error):
                    TROUBLES.tell("registry", error)
                self.reachable = False
                continue
            if not self.reachable:
                self.reachable, self.steady_since_s = True, self.clock.monotonic()


def _adapter(row: list[bytes | None]) -> Adapter | None:
    model, version = row
    if model is None:
        return None
    try:
        return Adapter(model.decode(), int(version or 0))
    except ValueError as error:
        raise MessageError(str(error)) from error
