"""The dispatch loop of one model: one leader, by a lease whose fencing token every release proves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial

from redis.asyncio import Redis

from collm_common import post
from collm_common.broker import AWAY, stop_all
from collm_common.clock import Clock, ticks
from collm_common.errors import FencedError
from collm_common.lease import Lease
from collm_common.messages import PauseTraining, ReplicaChanged, Request, ResumeTraining
from collm_common.requeue import give_up_subflow
from collm_common.retry import forever
from collm_common.types import ReplicaState, Slo
from collm_dispatcher.backlog import Backlog
from collm_dispatcher.cell import Cell, Member
from collm_dispatcher.originals import Originals
from collm_dispatcher.policy.balance import Balance, Carrier, Demand, Limits, Plan
from collm_dispatcher.policy.forecast import Forecast
from collm_dispatcher.policy.pacing import Mode, Room, Shape, combined_mode, deal, due_s, serving_mode
from collm_dispatcher.prospects import latest_start_s
from collm_dispatcher.release import Mover
from collm_dispatcher.settings import DispatcherSettings

log = logging.getLogger(__name__)
BATCH = 128


class Leader:
    """Reads a model's streams while it holds the lease `dispatch:{model}`; else it only tries to get it."""

    def __init__(
        self, model: str, settings: DispatcherSettings, redis: Redis, cell: Cell, holder: str, clock: Clock
    ) -> None:
        self.model, self.settings, self.redis, self.cell, self.clock = model, settings, redis, cell, clock
        self.keys, self.holder = settings.keys, holder
        self.lease = Lease(redis, self.keys, f"dispatch:{model}", holder, settings.lease_ttl_s)
        self.plan = Plan()
        self._streams: dict[str, str] = {}
        self._mover, self._originals = Mover(redis, self.keys), Originals(redis, self.keys)
        self._token: str | None = None
        self._held_s = clock.monotonic()
        self._tasks: list[asyncio.Task[None]] = []
        self._wake, self._urgent = asyncio.Event(), asyncio.Event()
        self._modes: dict[str, Mode] = {}
        self._paced_for: list[Slo] = []
        self._backlog = self._new_backlog()

    @property
    def leads(self) -> bool:
        """Whether this process holds the lease, as far as it knows."""
        return self._token is not None

    @property
    def held(self) -> int:
        """Entries read and not released."""
        return len(self._backlog.queue)

    def follow(self, slos: Collection[str]) -> None:
        """Requests of these classes may exist. While it leads, it gives up only streams that it has removed itself."""
        found = {self.keys.requests(self.model, slo): slo for slo in slos}
        self._streams = {**self._streams, **found} if self.leads else found
        if self.leads:
            for key in found:
                self._backlog.follow(key)

    async def prune(self) -> None:
        """While it leads: remove streams of no configured class that were not used for a while."""

        if self._token is None:
            return
        leading = self._token

        async def remove(key: str) -> bool:
            removed = await self._originals.prune(self.lease.key, leading, self.model, self._streams[key])
            if removed:
                del self._streams[key]
                log.info("removed the stream %s: unused for %g s", key, self.settings.stream_idle_s)
            return removed

        kept = {self.keys.requests(self.model, slo) for slo in self.settings.class_names}
        with suppress(FencedError):
            await self._backlog.prune(self.settings.stream_idle_s, kept, remove)

    async def run(self) -> None:
        """For ever; gives the lease back at the end."""
        try:
            async for _ in ticks(self.settings.lease_ttl_s / 4, self.clock):
                asked_s = self.clock.monotonic()
                try:
                    token = await self.lease.hold()
                except AWAY as error:
                    log.warning("lease of %s: broker away: %s", self.model, error)
                    continue
                self._held_s = asked_s
                if token != self._token:
                    await self._step_down()
                    if token is not None:
                        self._step_up(token)
                self._check()
        finally:
            await self._step_down()
            with suppress(*AWAY):
                await self.lease.release()

    # --- leadership

    def _new_backlog(self) -> Backlog:
        def latest_s(request: Request) -> float | None:
            return latest_start_s(request, self.cell.of(self.model))

        held = self.settings.max_held
        return Backlog(self.redis, self.keys, self.holder, held, self.clock, self._arrived, latest_s)

    def _arrived(self) -> None:
        self._wake.set()
        if not self.plan.carriers:
            self._urgent.set()

    def _step_up(self, token: str) -> None:
        log.info("leading %s as %s", self.model, token)
        self._token, self._backlog = token, self._new_backlog()
        for key in self._streams:
            self._backlog.follow(key)
        self._balance = Balance(_limits(self.settings))
        self._forecast, self._observed_s = Forecast(), self.clock.monotonic()
        loops = (self._release_loop(token), self._macro_loop(), self._reclaim_loop())
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def _step_down(self) -> None:
        if self._token is None:
            return
        log.info("not leading %s any more", self.model)
        self._token = None
        tasks, self._tasks = self._tasks, []
        await stop_all(*tasks)
        await self._backlog.close()
        self._backlog, self.plan = self._new_backlog(), Plan()

    def _check(self) -> None:
        self._backlog.check()
        for task in self._tasks:
            if task.done():
                task.result()

    # --- micro-cycle

    async def _release_loop(self, token: str) -> None:
        try:
            await forever(f"release {self.model}", lambda: self._release(token), self.clock)
        except FencedError as error:
            log.warning("%s: nothing was moved", error)

    async def _release(self, token: str) -> None:
        """One turn: shed, move what there is room for, then wait for an arrival or a moment for room."""
        self._wake.clear()
        backlog, now = self._backlog, self.clock.now()
        for item in backlog.queue.shed(now):
            await self._mover.refuse(
                item, 503, "rejected-ttl-expired", "it cannot be served before its deadline any more"
            )
            backlog.settle(item)
        pause_s = await self._release_due(token, now) if self.held and self.plan.carriers else None
        if self.held and pause_s is None:
            pause_s = self.settings.macro_s
        await self._pause(pause_s)

    async def _release_due(self, token: str, now: float) -> float:
        """Returns seconds until it is worth trying again."""
        queue = self._backlog.queue
        if self._backlog.slos() != self._paced_for:
            self._set_modes()
        modes = self._modes
        rooms = await self._rooms(modes)
        free = sum(max(0, room.b - room.in_flight) for room in rooms)
        if free == 0:
            return self.settings.poll_s
        first = queue.first(min(free, BATCH))
        due = due_s(now, len(queue), free, first[0].deadline_s, modes[rooms[0].id], self.settings.hold_s)
        waited_s = now - min(item.arrival_s for item in first)
        if due > now and waited_s < self.settings.hold_s:
            return min(due - now, self.settings.hold_s - waited_s)
        shares: dict[str, list[int]] = {}
        for index, replica in enumerate(deal(rooms, len(first))):
            shares.setdefault(replica, []).append(index)
        for replica, indices in shares.items():
            items = [first[index] for index in indices]
            _, settled = await self._mover.release(self.lease.key, token, replica, modes[replica].b, items)
            for item in items[:settled]:
                self._backlog.settle(item)
        return self.settings.poll_s

    async def _rooms(self, modes: Mapping[str, Mode]) -> list[Room]:
        members = self.cell.members
        ids = [id_ for id_ in self.plan.carriers if id_ in modes]
        ids = [id_ for id_ in ids if id_ in members and members[id_].takes_requests]
        if not ids:
            return []
        async with self.redis.pipeline(transaction=False) as pipe:
            for id_ in ids:
                pipe.xlen(self.keys.subflow(id_))
            lengths = await pipe.execute()
        return [Room(id_, modes[id_].b, int(n)) for id_, n in zip(ids, lengths, strict=True)]

    async def _pause(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wake.wait()

    # --- macro-cycle

    async def _reclaim_loop(self) -> None:
        async def step() -> None:
            async for _ in ticks(max(1.0, self.settings.lease_ttl_s / 3), self.clock):
                await self._backlog.reclaim()

        await forever(f"reclaim {self.model}", step, self.clock)

    async def _macro_loop(self) -> None:
        async def step() -> None:
            await self._macro()
            self._urgent.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self.settings.macro_s):
                    await self._urgent.wait()

        await forever(f"balance {self.model}", step, self.clock)

    async def _macro(self) -> None:
        slept = self.clock.monotonic() - self._held_s > self.settings.lease_ttl_s
        if slept or not self.cell.reachable:
            return
        await self._bury()
        members = self.cell.of(self.model)
        self._set_modes()
        arrived, self._backlog.arrivals = self._backlog.arrivals, 0
        now_s = self.clock.monotonic()
        self._forecast.observe(arrived, now_s - self._observed_s)
        self._observed_s = now_s
        plan = self._balance.tick(
            [_carrier(member, self._modes[member.info.id]) for member in members],
            Demand(self.held, self._forecast.rate),
        )
        self.plan = plan
        await self._apply(plan)
        self._wake.set()

    def _set_modes(self) -> None:
        self._paced_for = self._backlog.slos()
        self._modes = {member.info.id: self._mode(member) for member in self.cell.of(self.model)}

    def _mode(self, member: Member) -> Mode:
        most, sizes, model = member.info.infer_batch_max, member.sizes, member.latency
        training = member.info.state is ReplicaState.COMBINED and sizes is not None
        shape = Shape(
            prefill_s=0.0 if model is None else model.prefill_s(self._backlog.prompt_tokens),
            output_tokens=1.0 if model is None else model.output_tokens,
        )
        step = None if model is None else partial(model.iteration_s, member.train_batch)
        if training and sizes is not None:
            return combined_mode(step, shape, min(most, sizes.infer))
        return serving_mode(step, shape, self._paced_for, most)

    async def _apply(self, plan: Plan) -> None:
        for replica in plan.promote:
            before, after = ReplicaState.IDLE, ReplicaState.SERVING
            await self.cell.registry.transition(replica, before, after, plan.reason, self.clock.now())
        if plan.promote:
            await self.cell.refresh()
        for replica in plan.pause:
            await post.command(self.redis, self.keys, replica, PauseTraining(), "dispatcher")
        for replica in plan.resume:
            await post.command(self.redis, self.keys, replica, ResumeTraining(), "dispatcher")

    async def _bury(self) -> None:
        """Give back what replicas without a lease had; not while leases may be gone because the broker was away."""
        if self.clock.monotonic() - self.cell.steady_since_s < self.settings.away_grace_s:
            return
        for member in self.cell.of(self.model):
            info = member.info
            if info.alive or not (info.ready or await self.redis.xlen(self.keys.subflow(info.id))):
                continue
            lost = await give_up_subflow(self.redis, self.keys, info.id)
            log.warning("replica %s is gone: %d requests go back", info.id, lost)
            event = ReplicaChanged(replica=info.id, what="down", reason="its lease ran out", time_s=self.clock.now())
            await self.cell.registry.announce(event, info.id)
            await self.cell.registry.update(info.id, ready=False)
            await self.cell.refresh()


def _carrier(member: Member, mode: Mode) -> Carrier:
    info = member.info
    return Carrier(info.id, info.state, member.usable, mode, info.quality)


def _limits(settings: DispatcherSettings) -> Limits:
    def ticks_in(seconds: float) -> int:
        return max(1, round(seconds / settings.macro_s))

    return Limits(
        headroom=settings.headroom,
        pause_ticks=ticks_in(settings.pause_s),
        resume_ticks=ticks_in(settings.resume_s),
    )
