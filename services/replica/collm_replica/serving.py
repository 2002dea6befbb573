"""The inference process around its engine: subflow in, steps, replies out, adapters swapped between two steps."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
from msgspec import Struct
from redis.asyncio import Redis

from collm_common import messages
from collm_common.broker import patiently, stop_all
from collm_common.clock import Clock
from collm_common.errors import BrokerError, MessageError, RequestError, Unavailable
from collm_common.messages import Done, Expected, Failed, Request
from collm_common.requeue import GROUP
from collm_common.retry import once
from collm_common.streams import AckPolicy, Entry, WorkQueue
from collm_common.tracing import UNTRACED, Tracer
from collm_replica.adapter_feed import AdapterFeed
from collm_replica.engine.guide import Guide
from collm_replica.engine.protocol import InferenceEngine, Staged
from collm_replica.outbox import Open, Outbox
from collm_replica.pressure import Pressure
from collm_replica.reports import Reports
from collm_replica.schemas import Schemas
from collm_replica.settings import ReplicaSettings
from collm_replica.telemetry import Utilisation
from collm_replica.traces import Traces
from collm_replica.versions import Versions

log = logging.getLogger(__name__)

FIRST_READ_S = 60.0
STRAYS_S = 2.0


class Arrival(Struct, frozen=True):
    """A request on its way into the engine, with the version that it pins, its schema's guide, or why it is refused."""

    entry_id: str
    request: Request
    pinned: Staged | None
    refusal: RequestError | None
    expected: Expected | None
    guide: Guide | None = None


class Serving:
    """Touches the engine only between two steps, on the event loop; a step runs in a thread."""

    def __init__(
        self,
        settings: ReplicaSettings,
        redis: Redis,
        engine: InferenceEngine,
        feed: AdapterFeed,
        utilisation: Utilisation,
        clock: Clock,
        tracer: Tracer = UNTRACED,
    ) -> None:
        self.settings, self.redis, self.engine = settings, redis, engine
        self.clock, self.keys = clock, settings.keys
        self.versions = Versions(engine, feed, self.between_steps)
        self.reports = Reports(settings, redis, engine, self.versions, utilisation, clock)
        self._schemas = Schemas(engine.guide)
        self.pressure, self.pressure_changed = Pressure(), asyncio.Event()
        self.steps = 0
        self.draining = False
        self._traces = Traces(tracer, self.keys.subflow(settings.id), clock)
        self._outbox = Outbox(redis, self.keys, settings.id)
        self._open: dict[str, Open] = {}
        self._between_steps: deque[Callable[[], None]] = deque()
        self._forget: list[str] = []
        self._refused: list[tuple[Open, Failed]] = []
        self._parked: list[Arrival] = []
        self._wake = asyncio.Event()
        self._strays_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether steps must be made: there is work, and room for what they say."""
        return self.engine.has_work and not self._outbox.full

    async def run(self) -> None:
        """Until drained, or until one of its loops fails."""
        engine = asyncio.create_task(self._run_engine())
        others = [asyncio.create_task(loop) for loop in (self._intake(), self._outbox.run(), self.reports.run())]
        try:
            done, _ = await asyncio.wait([engine, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            await asyncio.wait_for(self._outbox.flushed(), self.settings.drain_s)
        finally:
            await stop_all(engine, *others)

    # --- commands, called from the event loop at any time

    def drain(self) -> None:
        """Take nothing new; `run` returns once all that is here is answered."""
        self.draining = True
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Before the next step; nothing is replied."""

        def act() -> None:
            self.engine.cancel(request_id)
            self._forget_parked(request_id)
            if (open_ := self._open.pop(request_id, None)) is not None:
                self._forget.append(open_.entry_id)
                if open_.trace is not None:
                    open_.trace.failed("cancelled")

        self.between_steps(act)

    def limit(self, infer_batch: int) -> None:
        """The live limit b, capped by the engine's own."""
        self.between_steps(lambda: setattr(self.engine, "limit", min(infer_batch, self.settings.max_batch)))

    def between_steps(self, act: Callable[[], None]) -> None:
        """Run `act` on the event loop while no step is running."""
        self._between_steps.append(act)
        self._wake.set()

    @property
    def parked(self) -> int:
        """Requests that wait for an adapter slot."""
        return len(self._parked)

    # --- the engine

    async def _run_engine(self) -> None:
        while True:
            self._act()
            await self._say([])
            if self.engine.has_work:
                result = await asyncio.to_thread(self.engine.step)
                self.steps += 1
                self.reports.count(result)
                limits = [open_.tpot_s for open_ in self._open.values() if open_.tpot_s is not None]
                if self.pressure.update(result.duration_s, min(limits, default=None)):
                    self.pressure_changed.set()
                await self._say(result.replies)
            elif self.draining and not self._between_steps:
                return
            else:
                self._wake.clear()
                if self.pressure.rest():
                    self.pressure_changed.set()
                if not self._between_steps and not self.draining:
                    await self._wake.wait()

    def _act(self) -> None:
        while self._between_steps:
            self._between_steps.popleft()()
        self.versions.install_waiting()
        if self._parked:
            self._unpark()

    async def _say(self, replies: list[messages.Delta | Done | Failed]) -> None:
        addressed: list[tuple[Open, messages.Reply]] = list(self._refused)
        for reply in replies:
            final = isinstance(reply, Done | Failed)
            open_ = self._open.pop(reply.id, None) if final else self._open.get(reply.id)
            if open_ is not None:
                if isinstance(reply, messages.Delta) and reply.finish is not None:
                    self._open[reply.id] = msgspec.structs.replace(open_, adapter=reply.adapter)
                if isinstance(reply, Done):
                    reply = msgspec.structs.replace(reply, expected=open_.expected, replica=self.settings.id)
                    self.reports.answered(open_, reply)
                if open_.trace is not None and final:
                    open_.trace.end(reply)
                addressed.append((open_, reply))
        forget, self._forget, self._refused = self._forget, [], []
        await self._outbox.put(addressed, forget)

    # --- requests

    async def _intake(self) -> None:
        queue = WorkQueue(
            self.redis, self.keys.subflow(self.settings.id), GROUP, self.settings.id, AckPolicy.BY_HANDLER
        )
        await once("subflow", queue.create, self.clock)

        async def step() -> None:
            for entry in await self._strays(queue) + await queue.read(self.settings.max_waiting):
                await self._receive(entry)

        while not self.draining:
            await once("subflow", step, self.clock)
        await asyncio.Event().wait()

    async def _strays(self, queue: WorkQueue) -> list[Entry]:
        """Entries that the group has given this replica and that are not here.

        A connection lost them on their way, or a restarted broker forgot that they were acknowledged; either way each
        would keep its place in the batch for ever. To serve one twice costs tokens that nobody reads.
        """
        now_s = self.clock.monotonic()
        if now_s < self._strays_s:
            return []
        self._strays_s = now_s + STRAYS_S
        known = set(self._outbox.unacknowledged)
        pending = await queue.unfinished(len(known) + self.settings.max_waiting)
        return [entry for entry in pending if entry.entry_id not in known]

    async def _receive(self, entry: Entry) -> None:
        self._outbox.unacknowledged.add(entry.entry_id)
        try:
            request = messages.decode_as(Request, entry.data)
        except MessageError as error:
            log.error("dropping entry %s of %s: %s", entry.entry_id, entry.key, error)
            self._forget.append(entry.entry_id)
            self._wake.set()
            return
        self.versions.expect(request)
        pinned: Staged | None = None
        guide: Guide | None = None
        refusal: RequestError | None = None
        try:
            if schema := request.sampling.json_schema:
                guide = await self._schemas.guide(schema)
            request, pinned = await patiently(partial(self.versions.pin, request), FIRST_READ_S)
        except RequestError as error:
            refusal = error
        except BrokerError as error:
            refusal = Unavailable(str(error), code="broker_away")
        arrival = Arrival(entry.entry_id, request, pinned, refusal, _expected(entry), guide)
        self.between_steps(lambda: self._admit(arrival))

    def _admit(self, arrival: Arrival) -> None:
        """Between two steps. A repeated delivery of an attempt that is here is dropped, a newer attempt replaces it."""
        request, pinned = arrival.request, arrival.pinned
        self.versions.arrived(request)
        here = self._open.get(request.id)
        if here is not None and here.entry_id == arrival.entry_id:
            return
        if here is not None and here.attempt >= request.attempt:
            self._forget.append(arrival.entry_id)
            return
        try:
            if arrival.refusal is not None:
                raise arrival.refusal
            if (pinned is not None and not self.versions.put(pinned)) or self.versions.lacks_slot(request.adapter):
                self._park(arrival)
                return
            self.engine.add(request, arrival.guide)
            self.reports.admitted(request)
        except RequestError as error:
            self._refuse(arrival, error)
            return
        finally:
            if pinned is not None:
                self.engine.discard(pinned.ref)
        if here is not None:
            self._forget.append(here.entry_id)
            if here.trace is not None:
                here.trace.failed("replaced")
        self._open[request.id] = Open(
            arrival.entry_id,
            request.ingress,
            request.attempt,
            request.slo.name,
            request.slo.tpot_s,
            arrival.expected,
            trace=self._traces.begin(request),
        )

    def _park(self, arrival: Arrival) -> None:
        """Until a running request leaves an adapter slot."""
        if len(self._parked) >= self.settings.max_waiting:
            self._refuse(arrival, _no_slot(arrival.request))
            return
        self.versions.expect(arrival.request)
        self._parked.append(arrival)

    def _unpark(self) -> None:
        """Try again; where nothing runs that could leave a slot, there will be none."""
        parked, self._parked = self._parked, []
        for arrival in parked:
            self._admit(arrival)
        if self.engine.has_work:
            return
        for arrival in self._parked:
            self.versions.arrived(arrival.request)
            self._refuse(arrival, _no_slot(arrival.request))
        self._parked = []

    def _forget_parked(self, request_id: str) -> None:
        for arrival in [arrival for arrival in self._parked if arrival.request.id == request_id]:
            self._parked.remove(arrival)
            self.versions.arrived(arrival.request)
            self._forget.append(arrival.entry_id)

    def _refuse(self, arrival: Arrival, error: RequestError) -> None:
        request = arrival.request
        failed = Failed(request.id, request.attempt, error.status, error.code, error.message, error.param)
        self._refused.append((Open(arrival.entry_id, request.ingress, request.attempt), failed))


def _no_slot(request: Request) -> Unavailable:
    return Unavailable(f"no adapter slot is free for {request.adapter}", code="adapter_slots_full")


def _expected(entry: Entry) -> Expected | None:
    """What the dispatch loop noted on the entry; what somebody damaged is nothing."""
    try:
        return msgspec.json.decode(entry.note, type=Expected) if entry.note else None
    except msgspec.DecodeError as error:
        log.error("note on entry %s of %s: %s", entry.entry_id, entry.key, error)
        return None
