"""The macro-cycle's ends: what the cell looks like goes into the plan, what the plan asks for is carried out."""

from __future__ import annotations

import logging

import msgspec
from redis.asyncio import Redis

from collm_common.clock import Clock
from collm_common.messages import Expected, ReplicaChanged
from collm_common.requeue import give_up_subflow
from collm_common.trouble import contained
from collm_common.types import ReplicaInfo, ReplicaState
from collm_dispatcher.cell import Cell, Member
from collm_dispatcher.policy.balance import Balance, Limits, Plan
from collm_dispatcher.policy.drift import Drift
from collm_dispatcher.policy.fill import Carrier
from collm_dispatcher.policy.micro import Release
from collm_dispatcher.policy.outlook import Fit, Pace, fastest, modes
from collm_dispatcher.policy.pacing import Mode
from collm_dispatcher.policy.queue import DeadlineQueue
from collm_dispatcher.policy.recall import Patience
from collm_dispatcher.policy.streams import Stream, Streams
from collm_dispatcher.recalling import Recaller
from collm_dispatcher.settings import DispatcherSettings

log = logging.getLogger(__name__)


class Planner:
    """`plan`, `fits` and `pace` are of the last tick; `drifts` corrects the fits by what was measured."""

    def __init__(
        self,
        model: str,
        settings: DispatcherSettings,
        redis: Redis,
        cell: Cell,
        streams: Streams,
        queue: DeadlineQueue,
        clock: Clock,
    ) -> None:
        self.model, self._settings, self._redis, self._cell = model, settings, redis, cell
        self._streams, self._queue, self._clock, self._keys = streams, queue, clock, settings.keys
        self._balance = Balance(_limits(settings))
        self._recaller = Recaller(redis, self._keys, cell, clock)
        self._observed_s = clock.monotonic()
        self.plan = Plan()
        self.fits: dict[str, Fit] = {}
        self.pace: Pace | None = None
        self.drifts: dict[str, Drift] = {}

    async def tick(self) -> Plan:
        """One macro-cycle, carried out."""
        await self._bury()
        members = self._cell.of(self.model)
        now_s = self._clock.monotonic()
        self._streams.observe(now_s - self._observed_s)
        self._observed_s = now_s
        queued = {key: count for key, count in self._queue.counts().items() if count}
        streams = self._streams.lately(now_s, queued)
        demands = self._streams.demands(streams, queued)
        busiest = max(streams, key=lambda key: demands[key].rate, default=None)
        self._read(members, streams[busiest] if busiest else None)
        ideal = modes(self.fits.values(), streams)
        carriers = [self._carrier(member, ideal[self.fits[member.info.id]], streams, busiest) for member in members]
        self.plan = self._balance.tick(carriers, demands)
        await self._apply(self.plan, streams[busiest] if busiest else None)
        return self.plan

    def expected(self, release: Release) -> Expected | None:
        """What a request should take there beside those that are there already; None without a fit."""
        fit, stream = self.fits.get(release.replica), self._streams.of(release.item.key)
        if fit is None or stream is None:
            return None
        return fit.expected(stream, release.item.prompt_tokens, release.ahead + 1)

    def _read(self, members: list[Member], busiest: Stream | None) -> None:
        ids = {member.info.id for member in members}
        self.drifts = {id_: drift for id_, drift in self.drifts.items() if id_ in ids}
        self.fits = {member.info.id: self._fit(member) for member in members}
        usable = [self.fits[member.info.id] for member in members if member.usable]
        self.pace = fastest(usable, busiest)

    def _fit(self, member: Member) -> Fit:
        most, drift = member.info.infer_batch_max, self.drifts.get(member.info.id)
        if member.info.state is ReplicaState.COMBINED and member.sizes is not None:
            most = min(most, member.sizes.infer)
        return Fit(member.latency, most, member.train_batch, drift.factor if drift else 1.0)

    def _carrier(
        self, member: Member, ideal: dict[str, Mode], streams: dict[str, Stream], busiest: str | None
    ) -> Carrier:
        info, fit = member.info, self.fits[member.info.id]
        mode = ideal[busiest] if busiest else Mode(fit.most)
        alone = None
        if busiest and info.state is ReplicaState.COMBINED:
            alone = msgspec.structs.replace(fit, most=info.infer_batch_max, train_batch=0).mode(streams[busiest])
        return Carrier(info.id, info.state, member.usable, mode, info.quality, ideal, alone, member.train_batch)

    async def _apply(self, plan: Plan, busiest: Stream | None) -> None:
        for replica in plan.promote:
            before, after = ReplicaState.IDLE, ReplicaState.SERVING
            await self._cell.registry.transition(replica, before, after, plan.reason, self._clock.now())
        await self._recaller.apply(plan.recall, self.fits, busiest)
        if plan.promote or plan.recall.stop:
            await self._cell.refresh()

    async def _bury(self) -> None:
        """Give back what replicas without a lease had; not while leases may be gone because the broker was away."""
        if self._clock.monotonic() - self._cell.steady_since_s < self._settings.away_grace_s:
            return
        for member in self._cell.of(self.model):
            if not member.info.alive:
                with contained(f"subflow of {member.info.id}"):
                    await self._give_back(member.info)

    async def _give_back(self, info: ReplicaInfo) -> None:
        if not (info.ready or await self._redis.xlen(self._keys.subflow(info.id))):
            return
        lost = await give_up_subflow(self._redis, self._keys, info.id)
        log.warning("replica %s is gone: %d requests go back", info.id, lost)
        event = ReplicaChanged(replica=info.id, what="down", reason="its lease ran out", time_s=self._clock.now())
        await self._cell.registry.announce(event, info.id)
        await self._cell.registry.update(info.id, ready=False)
        await self._cell.refresh()


def _limits(settings: DispatcherSettings) -> Limits:
    def ticks_in(seconds: float) -> int:
        return max(1, round(seconds / settings.macro_s))

    patience = Patience(ticks_in(settings.pause_s), ticks_in(settings.stop_s), ticks_in(settings.resume_s))
    return Limits(headroom=settings.headroom, patience=patience)
