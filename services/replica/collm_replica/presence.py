"""How the cell sees this replica: registry entry, lease, readiness; requests go back while it cannot serve."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from collm_common.broker import AWAY, patiently
from collm_common.clock import Clock, ticks
from collm_common.errors import BrokerError, BrokerFault
from collm_common.messages import Event, ReplicaChanged
from collm_common.registry import Registry
from collm_common.requeue import give_up_subflow
from collm_common.retry import once
from collm_common.trouble import TROUBLES
from collm_common.types import ReplicaInfo, ReplicaState
from collm_replica.channel import Ready
from collm_replica.settings import ReplicaSettings

log = logging.getLogger(__name__)

LEAVE_S = 5.0
OWN = (
    "incarnation",
    "ready",
    "infer_batch_max",
    "context_tokens",
    "base_digest",
    "data_url",
    "model",
    "trainable",
    "train_rank",
)


class Presence:
    """Exists in Redis from the first real step of the inference process until `leave`."""

    def __init__(self, settings: ReplicaSettings, redis: Redis, clock: Clock) -> None:
        self._settings, self._redis, self._clock = settings, redis, clock
        self._keys = settings.keys
        self.registry = Registry(redis, self._keys)
        self.info: ReplicaInfo | None = None
        self.can_train = settings.engine == "torch"
        self._draining = False

    async def up(self, ready: Ready, data_url: str) -> None:
        """The inference process works: a first entry, or the old one with a new incarnation."""
        settings, first = self._settings, self.info is None
        self.info = ReplicaInfo(
            id=settings.id,
            model=settings.served_name,
            incarnation=uuid.uuid4().hex[:12],
            state=ReplicaState.SERVING,
            ready=True,
            infer_batch_max=ready.infer_batch_max,
            context_tokens=ready.context_tokens,
            base_digest=ready.base_digest,
            data_url=data_url,
            trainable=self._trainable(),
            train_rank=settings.train_rank,
        )
        await once("registry", self._start_over if first else self._write, self._clock)
        await self._announce("up", f"incarnation {self.info.incarnation}")

    async def down(self, why: str) -> None:
        """The inference process is gone: not ready, and what it had goes back to be served elsewhere."""
        if self.info is None:
            return
        self.info = msgspec.structs.replace(self.info, ready=False)
        id_ = self.info.id
        await once("registry", self._write, self._clock)
        await self._announce("restarting", why)
        lost = await patiently(lambda: give_up_subflow(self._redis, self._keys, id_), self._settings.start_timeout_s)
        log.warning("gave %d requests back", lost)

    async def announce_finetune(self, why: str) -> None:
        """The fine-tuning process is gone; serving goes on."""
        await self._announce("finetune_restarting", why)

    async def not_ready(self) -> None:
        """Nothing new, please: what is here will be answered."""
        self._draining = True
        if self.info is not None:
            self.info = msgspec.structs.replace(self.info, ready=False)
            await self._while_leaving(partial(self.registry.update, self.info.id, ready=False))

    async def leave(self) -> None:
        """Give back what is left and remove the entry."""
        if self.info is not None:
            id_, self.info = self.info.id, None
            await self._while_leaving(partial(give_up_subflow, self._redis, self._keys, id_))
            await self._while_leaving(partial(self.registry.remove, id_, "shut down", self._clock.now()))

    async def _while_leaving(self, call: Callable[[], Awaitable[object]]) -> None:
        """Without a broker it leaves all the same: others find out by its lease."""
        try:
            await patiently(call, LEAVE_S)
        except BrokerError as error:
            log.error("leaving unannounced: %s", error)

    async def beat(self) -> None:
        """Renew the lease for ever; rewrite an entry that the broker lost; keep an unready replica's subflow empty."""
        async for _ in ticks(self._settings.lease_ttl_s / 4, self._clock):
            try:
                await self._beat_once()
            except AWAY as error:
                TROUBLES.tell("heartbeat", error)

    async def _beat_once(self) -> None:
        if self.info is None:
            return
        await self.registry.heartbeat(self.info.id, self.info.incarnation, self._settings.lease_ttl_s)
        known = await self.registry.replica(self.info.id)
        # Read only now: the inference process may have died meanwhile.
        info = self.info
        if known is None:
            log.warning("the registry entry was lost or damaged: written again")
            await self._write()
        elif known.ready is not info.ready:
            log.warning("the registry says the contrary: ready is %s again", info.ready)
            await self.registry.update(info.id, ready=info.ready)
        if info.trainable is not (trainable := self._trainable()):
            self.info = msgspec.structs.replace(self.info, trainable=trainable)
            await self.registry.update(info.id, trainable=trainable)
        if not info.ready:
            await give_up_subflow(self._redis, self._keys, info.id, unread=self._draining)

    def _trainable(self) -> bool:
        """Whether there is a process that trains, and anything to train on."""
        return self.can_train and any(map(_has_text, Path(self._settings.data_dir).rglob("*.jsonl")))

    async def _start_over(self) -> None:
        """What an earlier life of this replica left behind says nothing about this one."""
        id_ = self._settings.id
        await give_up_subflow(self._redis, self._keys, id_)
        if (known := await self.registry.replica(id_)) is not None and known.state is not ReplicaState.SERVING:
            now = self._clock.now()
            await self.registry.transition(id_, known.state, ReplicaState.SERVING, "the replica started anew", now)
        await self._write()

    async def _write(self) -> None:
        """A restart of the inference process leaves state, quality and job to the services that decide them."""
        assert self.info is not None
        info, id_ = self.info, self._settings.id
        if await self.registry.replica(id_) is None:
            await self.registry.register(info, self._settings.lease_ttl_s)
            return
        await self.registry.update(id_, **{name: getattr(info, name) for name in OWN})
        await self.registry.heartbeat(id_, info.incarnation, self._settings.lease_ttl_s)

    async def _announce(self, what: str, why: str) -> None:
        event = ReplicaChanged(replica=self._settings.id, what=what, reason=why, time_s=self._clock.now())
        await self.announce(event, self._settings.id, self._settings.start_timeout_s)

    async def announce(self, event: Event, about: str, within_s: float) -> None:
        """Tell the cell; a damaged stream of events costs the event. Raises BrokerError if the broker stays away."""
        try:
            await patiently(partial(self.registry.announce, event, about), within_s)
        except BrokerFault as error:
            log.error("not announced: %s", error)


def _has_text(path: Path) -> bool:
    """False for a file that is gone by now, or a link to nowhere."""
    try:
        return path.stat().st_size > 0
    except OSError:
        return False
