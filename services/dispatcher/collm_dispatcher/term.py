"""What the leader of a model does while it leads: read its streams, release, plan."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from math import inf

from redis.asyncio import Redis

from collm_common.broker import stop_all
from collm_common.clock import Clock, ticks
from collm_common.errors import FencedError
from collm_common.messages import Freed, InferenceReport, Request
from collm_common.retry import forever
from collm_common.trouble import contained
from collm_dispatcher.backlog import Backlog
from collm_dispatcher.cell import Cell
from collm_dispatcher.planner import Planner
from collm_dispatcher.policy.drift import Drift
from collm_dispatcher.policy.micro import Lane, MicroCycle, Release
from collm_dispatcher.policy.streams import Streams
from collm_dispatcher.release import Mover
from collm_dispatcher.settings import DispatcherSettings

log = logging.getLogger(__name__)
BATCH = 128


class Term:
    """One term of office under one fencing `token`; nothing of it outlives it.

    `held_s` (monotonic) is when the lease was last known to be held.
    """

    def __init__(
        self,
        model: str,
        token: str,
        lease_key: str,
        settings: DispatcherSettings,
        redis: Redis,
        cell: Cell,
        holder: str,
        clock: Clock,
    ) -> None:
        self.model, self.token, self._lease_key, self._settings = model, token, lease_key, settings
        self._redis, self._keys, self._cell, self._clock = redis, settings.keys, cell, clock
        self.held_s = clock.monotonic()
        self._mover = Mover(redis, self._keys)
        self._wake, self._urgent = asyncio.Event(), asyncio.Event()
        self.streams = Streams()
        self.backlog = Backlog(redis, self._keys, holder, settings.max_held, clock, self.streams, self)
        self.micro = MicroCycle(self.backlog.queue)
        self.planner = Planner(model, settings, redis, cell, self.streams, self.backlog.queue, clock)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to work."""
        loops = (self._release_loop(), self._macro_loop(), self._reclaim_loop())
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def close(self) -> None:
        """Stop. What is held stays pending for the next leader."""
        await stop_all(*self._tasks)
        await self.backlog.close()

    def check(self) -> None:
        """Raise the error of a loop that failed."""
        self.backlog.check()
        for task in self._tasks:
            if task.done():
                task.result()

    # --- what the backlog tells

    def latest_s(self, request: Request) -> float | None:
        """When it must begin to be in time; None when nobody can tell, or its answer has begun already."""
        pace = self.planner.pace
        if pace is None or request.prefix:
            return None
        prompt, most = len(request.prompt), request.sampling.max_tokens
        return pace.latest_start_s(request.arrival_s, prompt, most, request.slo)

    def arrived(self, news: bool) -> None:
        """Requests came in; `news`: of a stream that the plan may not know."""
        self._wake.set()
        if news or not self.micro.lanes:
            self._urgent.set()

    # --- what the replicas tell

    def freed(self, message: Freed) -> None:
        """Room has come back."""
        if message.replica in self.planner.fits:
            self.micro.ended(message.replica, message.requests)
            self._wake.set()

    def reported(self, report: InferenceReport) -> None:
        """Lengths and times of answers."""
        if report.replica not in self.planner.fits:
            return
        drift = self.planner.drifts.setdefault(report.replica, Drift())
        for answered in report.answered:
            key = self._keys.requests(self.model, answered.slo)
            self.streams.answered(key, answered.tokens, answered.cached_tokens)
            if answered.expected is not None and answered.token_s is not None:
                drift.observe(answered.expected.token_s, answered.expected.scale, answered.token_s)

    # --- micro-cycle

    async def _release_loop(self) -> None:
        try:
            await forever(f"release {self.model}", self._turn, self._clock)
        except FencedError as error:
            log.warning("%s: nothing was moved", error)

    async def _turn(self) -> None:
        """Shed, and move what there is room for; else wait for an arrival, for room, or for a new plan."""
        self._wake.clear()
        now = self._clock.now()
        for item in self.backlog.queue.shed(now):
            message = "it cannot be served before its deadline any more"
            await self._mover.refuse(item, 503, "rejected-ttl-expired", message)
            self.backlog.settle(item)
        releases, again_s = self.micro.decide(now, BATCH, self._settings.hold_s)
        if releases:
            await self._carry_out(releases)
        else:
            await self._pause(again_s - now)

    async def _carry_out(self, releases: list[Release]) -> None:
        groups: dict[str, list[Release]] = {}
        for release in releases:
            groups.setdefault(release.replica, []).append(release)
        if len(groups) == 1:
            await self._move(releases)
            return
        results = await asyncio.gather(*map(self._move, groups.values()), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _move(self, releases: list[Release]) -> None:
        """All to one replica. What is not moved waits again, also when it is not known whether it was."""
        replica, most, room, settled = releases[0].replica, releases[0].most, 0, 0
        try:
            items = [(release.item, self.planner.expected(release)) for release in releases]
            with contained(f"subflow of {replica}"):
                room, settled = await self._mover.release(self._lease_key, self.token, replica, most, items)
            self.micro.count(replica, most - room)
        finally:
            for release in releases[:settled]:
                self.backlog.settle(release.item)
            for release in reversed(releases[settled:]):
                self.micro.queue.restore(release.item)

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(None if seconds == inf else seconds):
                await self._wake.wait()

    # --- macro-cycle

    async def _reclaim_loop(self) -> None:
        async def step() -> None:
            async for _ in ticks(max(1.0, self._settings.lease_ttl_s / 3), self._clock):
                await self.backlog.reclaim()

        await forever(f"reclaim {self.model}", step, self._clock)

    async def _macro_loop(self) -> None:
        async def step() -> None:
            await self._plan()
            self._urgent.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._settings.macro_s):
                    await self._urgent.wait()

        await forever(f"balance {self.model}", step, self._clock)

    async def _plan(self) -> None:
        slept = self._clock.monotonic() - self.held_s > self._settings.lease_ttl_s
        if slept or not self._cell.reachable:
            return
        plan = await self.planner.tick()
        members = self._cell.members
        ids = [id_ for id_ in plan.carriers if id_ in members and members[id_].takes_requests]
        lanes = [Lane(id_, plan.modes[id_], members[id_].info.quality) for id_ in ids]
        known = set(ids)
        routes = {stream: [id_ for id_ in route if id_ in known] for stream, route in plan.routes.items()}
        await self._count(ids)
        self.micro.follow(lanes, routes)
        self._wake.set()

    async def _count(self, ids: list[str]) -> None:
        """How many requests each replica has: now and then the truth, whatever events were missed."""
        if not ids:
            return
        async with self._redis.pipeline(transaction=False) as pipe:
            for id_ in ids:
                pipe.xlen(self._keys.subflow(id_))
            lengths = await pipe.execute(raise_on_error=False)
        for id_, length in zip(ids, lengths, strict=True):
            with contained(f"subflow of {id_}"):
                if isinstance(length, Exception):
                    raise length
                self.micro.count(id_, int(length))
