"""Reads what the page shows. Nothing is read while nobody looks, and once a second however many do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from prometheus_client import CollectorRegistry

from collm_common.lookback import Recent, queues, subflows
from collm_common.messages import JobChanged
from collm_common.trouble import contained
from collm_common.types import Slo
from collm_dispatcher.cell import Cell
from collm_dispatcher.ingress.page.figures import figures
from collm_dispatcher.ingress.page.jobs import SHOWN
from collm_dispatcher.ingress.page.summary import Known, summary

EVERY_S = 1.0
REPORTS = 3000
EVENTS = 1000


class Feed:
    """The latest view as JSON, at most `EVERY_S` old."""

    def __init__(self, cell: Cell, classes: Mapping[str, Slo], registry: CollectorRegistry) -> None:
        self._cell, self._classes, self._registry = cell, classes, registry
        self._redis, self._keys, self._clock = cell.redis, cell.keys, cell.clock
        self._telemetry = Recent(self._redis, self._keys.telemetry, REPORTS)
        self._events = Recent(self._redis, self._keys.events, EVENTS)
        self._trains: dict[str, str] = {}
        self._lock = asyncio.Lock()
        self._made_s, self._page = float("-inf"), b""

    async def page(self) -> bytes:
        """Raises what a lost broker raises (`AWAY`)."""
        async with self._lock:
            if self._clock.monotonic() - self._made_s >= EVERY_S:
                self._page = msgspec.json.encode(summary(await self._known(), self._clock.now()))
                self._made_s = self._clock.monotonic()
            return self._page

    async def _known(self) -> Known:
        await self._telemetry.catch_up()
        await self._events.catch_up()
        members = dict(self._cell.members)
        return Known(
            members=members,
            adapters=dict(self._cell.adapters),
            queues=await queues(self._redis, self._keys),
            subflows=await subflows(self._redis, self._keys, members),
            telemetry=list(self._telemetry.messages),
            events=list(self._events.messages),
            trains=await self._adapters_of_jobs(),
            classes=self._classes,
            figures=figures(self._registry),
        )

    async def _adapters_of_jobs(self) -> dict[str, str]:
        """Of the jobs that are shown; a job's never changes."""
        jobs = list(dict.fromkeys(event.job for event in self._events.messages if isinstance(event, JobChanged)))
        shown = jobs[-SHOWN:]
        for job in shown:
            key = self._keys.job(job)
            with contained(key):
                if job not in self._trains and (name := await self._redis.hget(key, "adapter")):
                    self._trains[job] = name.decode(errors="replace")
        self._trains = {job: name for job, name in self._trains.items() if job in shown}
        return self._trains
