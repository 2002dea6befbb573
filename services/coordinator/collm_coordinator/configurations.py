"""The batch sizes in force: in Redis for everybody, and told to the replica that must keep to them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from redis.asyncio import Redis

from collm_common import latency, post
from collm_common.keys import Keys
from collm_common.messages import Configure
from collm_common.registry import Registry
from collm_common.types import BatchSizes, ReplicaInfo, ReplicaState
from collm_coordinator.metrics import Metrics

log = logging.getLogger(__name__)


class Configurations:
    """Whoever leads writes them; nothing is kept here."""

    def __init__(self, redis: Redis, keys: Keys, metrics: Metrics) -> None:
        self.redis, self.keys, self._metrics = redis, keys, metrics
        self._registry = Registry(redis, keys)

    async def sizes(self, replica: str) -> BatchSizes | None:
        """What was chosen last; damaged fields count as none, and are replaced by the next choice."""
        return (await latency.sizes_of(self.redis, self.keys, [replica])).get(replica)

    async def configure(self, replica: str, sizes: BatchSizes, reason: str) -> None:
        """These from now on."""
        share = f", {sizes.sm_share:.0%} of the SMs" if sizes.sm_share < 1 else ""
        log.info("%s: B = %d, b = %d%s: %s", replica, sizes.train, sizes.infer, share, reason)
        await latency.save_sizes(self.redis, self.keys, replica, sizes, reason)
        self._metrics.configured(replica, sizes)
        await self._command(replica, sizes)

    async def remind(self, replica: str) -> None:
        """A new process does not know what its predecessor was told."""
        known = await self.sizes(replica)
        if known is not None:
            await self._command(replica, known)

    async def restore(self, replica: str, reason: str) -> None:
        """Its whole batch back, once it trains no more."""
        info = await self._registry.replica(replica)
        if info is None or info.state is ReplicaState.COMBINED:
            return
        whole = BatchSizes(0, info.infer_batch_max)
        if await self.sizes(replica) != whole:
            await self.configure(replica, whole, reason)

    async def restore_strays(self, replicas: Mapping[str, ReplicaInfo]) -> None:
        """The same for replicas that left a job while nobody led."""
        for info in replicas.values():
            if info.state is ReplicaState.COMBINED:
                continue
            known = await self.sizes(info.id)
            if known is not None and known.train:
                await self.configure(info.id, BatchSizes(0, info.infer_batch_max), f"it is {info.state}")

    async def _command(self, replica: str, sizes: BatchSizes) -> None:
        await post.command(self.redis, self.keys, replica, Configure(sizes=sizes), "coordinator")
