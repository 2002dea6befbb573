"""The ingress role: HTTP in front, Redis behind, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from redis.asyncio import Redis

from collm_common.broker import AWAY, stop_all
from collm_common.clock import Clock
from collm_common.retry import once
from collm_common.tracing import UNTRACED, Tracer
from collm_dispatcher.cell import Cell
from collm_dispatcher.ingress.adapter_routes import AdapterRoutes
from collm_dispatcher.ingress.adapter_store import AdapterStore
from collm_dispatcher.ingress.answer import Answers
from collm_dispatcher.ingress.cell_metrics import CellView
from collm_dispatcher.ingress.courier import Courier
from collm_dispatcher.ingress.directory import Directory
from collm_dispatcher.ingress.feedback import Feedback
from collm_dispatcher.ingress.files import Files
from collm_dispatcher.ingress.gate import Gate
from collm_dispatcher.ingress.metrics import Metrics
from collm_dispatcher.ingress.objectives import classes
from collm_dispatcher.ingress.open_requests import OpenRequests
from collm_dispatcher.ingress.page.feed import Feed
from collm_dispatcher.ingress.page.routes import LivePage
from collm_dispatcher.ingress.recent import Recent
from collm_dispatcher.ingress.routes import Routes
from collm_dispatcher.ingress.tokenizing import load_all
from collm_dispatcher.ingress.tuning_routes import TuningRoutes
from collm_dispatcher.ingress.tuning_store import TuningStore
from collm_dispatcher.ingress.upload import Uploads
from collm_dispatcher.originals import Bounds
from collm_dispatcher.settings import DispatcherSettings

log = logging.getLogger(__name__)
PING_S = 2.0
BACKLOG = 1024
"""Connections that may wait to be accepted: a burst of clients must not find the line closed."""
ADAPTER_STORE_S = 120.0


class Ingress:
    """Built by `ingress()`. `port` is where it listens; `tasks` end only with an error."""

    def __init__(self, routes: Routes, opened: OpenRequests, clock: Clock) -> None:
        self.routes, self.opened, self._clock = routes, opened, clock
        self.port = 0
        self.tasks: list[asyncio.Task[None]] = []

    async def drain(self, within_s: float) -> None:
        """Refuse new requests and wait for the open ones, at most so long."""
        self.routes.draining = True
        end_s = self._clock.monotonic() + within_s
        while len(self.opened) and self._clock.monotonic() < end_s:
            await self._clock.sleep(0.05)
        if len(self.opened):
            log.warning("%d requests did not end within %g s", len(self.opened), within_s)


@asynccontextmanager
async def ingress(
    settings: DispatcherSettings, redis: Redis, clock: Clock, spans: Tracer = UNTRACED
) -> AsyncIterator[Ingress]:
    """Listens for as long as the block runs. Raises ModelError or SettingsError before it does."""
    tokenizers = await load_all(settings.models)
    cell, metrics = Cell(redis, settings.keys, clock), Metrics(settings.class_names, settings.vllm_metrics)
    view = CellView(cell)
    metrics.registry.register(view)
    opened = OpenRequests(settings.max_open, settings.retry_after_s)
    name = f"{settings.id or 'ingress'}-{uuid.uuid4().hex[:12]}"
    bounds = Bounds(settings.max_queued, settings.max_streams, settings.retry_after_s)
    courier = Courier(redis, settings.keys, name, cell, opened, bounds, clock)
    directory = Directory(settings.models, cell)
    gate = Gate(redis, settings.keys, settings.api_keys, settings.request_timeout_s)
    answers = Answers(settings, courier, opened, directory, tokenizers, metrics, clock)
    uploads = Uploads(cell, settings.max_upload_mb << 20, settings.request_timeout_s)
    adapters = AdapterRoutes(
        settings.adapter_dir,
        settings.max_adapter_mb << 20,
        settings.models,
        cell,
        AdapterStore(redis, settings.keys, settings.request_timeout_s + ADAPTER_STORE_S),
        answers,
        gate,
        clock,
    )

    limit, within_s = settings.max_upload_mb << 20, settings.request_timeout_s
    files = Files(redis, settings.keys, cell, tuple(settings.models), limit, within_s)
    tuning = TuningRoutes(redis, settings.keys, TuningStore(redis, settings.keys), directory, files, gate)
    recent = Recent(settings.feedback_mb << 20, settings.feedback_s, clock)
    feedback = Feedback(recent, cell, metrics, settings.max_body_kb << 10)

    async def broker_answers() -> bool:
        try:
            async with asyncio.timeout(PING_S):
                return cell.reachable and bool(await redis.ping())
        except AWAY:
            return False

    routes = Routes(
        answers,
        directory,
        uploads,
        recent,
        (adapters, files, tuning, feedback),
        metrics,
        gate,
        broker_answers,
        settings.max_body_kb << 10,
        settings.retry_after_s,
        spans,
    )
    app = routes.app()
    if settings.live_page:
        feed = Feed(cell, classes(settings.slo_classes), metrics.registry)
        LivePage(feed, clock).add_to(app)
    running = Ingress(routes, opened, clock)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await once("classes", answers.announce_classes, clock)
        await once("registry", cell.refresh, clock)
        following = (cell.run(settings.refresh_s), view.listen())
        loops = (*following, courier.run(), courier.watch(), courier.seek(settings.silent_s))
        running.tasks = [asyncio.create_task(loop) for loop in loops]
        await web.TCPSite(runner, settings.host, settings.port, backlog=BACKLOG).start()
        running.port = int(runner.addresses[0][1])
        yield running
    finally:
        await runner.cleanup()
        await stop_all(*running.tasks)
