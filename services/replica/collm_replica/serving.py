"""The inference process around its engine: subflow in, steps, replies out, adapters swapped between two steps."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from functools import partial

import msgspec
from redis.asyncio import Redis

from collm_common import messages, post
from collm_common.broker import AWAY, patiently, stop_all
from collm_common.clock import Clock, ticks
from collm_common.errors import (
    AdapterError,
    BrokerError,
    CollmError,
    MessageError,
    RequestError,
    Unavailable,
    UnknownModel,
)
from collm_common.messages import Done, Failed, InferenceReport, Request
from collm_common.registry import Registry
from collm_common.requeue import GROUP
from collm_common.retry import once
from collm_common.streams import AckPolicy, Entry, WorkQueue
from collm_common.types import AdapterRef
from collm_replica.adapter_feed import AdapterFeed, Loaded
from collm_replica.engine.protocol import InferenceEngine, StepResult
from collm_replica.outbox import Open, Outbox
from collm_replica.settings import ReplicaSettings
from collm_replica.telemetry import Utilisation, Window

log = logging.getLogger(__name__)

FIRST_READ_S = 60.0
STRAYS_S = 2.0


class Serving:
    """Touches the engine only between two steps, on the event loop; a step runs in a thread.

    `training_batch` is the micro-batch that the fine-tuning process runs right now (0: none).
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        redis: Redis,
        engine: InferenceEngine,
        feed: AdapterFeed,
        utilisation: Utilisation,
        clock: Clock,
    ) -> None:
        self.settings, self.redis, self.engine, self.feed = settings, redis, engine, feed
        self.utilisation, self.clock, self.keys = utilisation, clock, settings.keys
        self.training_batch = 0
        self.steps = 0
        self.draining = False
        self._registry = Registry(redis, self.keys)
        self._outbox = Outbox(redis, self.keys, settings.id)
        self._open: dict[str, Open] = {}
        self._between_steps: deque[Callable[[], None]] = deque()
        self._forget: list[str] = []
        self._refused: list[tuple[Open, Failed]] = []
        self._waiting_loads: dict[str, tuple[Loaded, bool]] = {}
        self._snapshots = self._published = 0
        self._wake = asyncio.Event()
        self._strays_s = 0.0
        self._window = Window(clock.monotonic())

    async def run(self) -> None:
        """Until drained, or until one of its loops fails."""
        engine = asyncio.create_task(self._run_engine())
        others = [asyncio.create_task(loop) for loop in (self._intake(), self._outbox.run(), self._report())]
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
            if (open_ := self._open.pop(request_id, None)) is not None:
                self._forget.append(open_.entry_id)

        self.between_steps(act)

    def limit(self, infer_batch: int) -> None:
        """The live limit b, capped by the engine's own."""
        self.between_steps(lambda: setattr(self.engine, "limit", min(infer_batch, self.settings.max_batch)))

    async def load(self, name: str, version: int) -> None:
        """Fetch a published version and make it current; one that does not fit is refused and logged."""
        try:
            if version == 0:
                self.between_steps(lambda: self.engine.publish(AdapterRef(name, "0")))
                return
            loaded = await patiently(lambda: self.feed.fetch(name, version), FIRST_READ_S)
        except CollmError as error:
            log.error("adapter %s@v%d is not loaded: %s", name, version, error)
            return
        self.between_steps(lambda: self._install(loaded, snapshot=False))

    def take_snapshot(self, loaded: Loaded) -> None:
        """Make a training snapshot current, unless something newer already is."""
        self.between_steps(lambda: self._install(loaded, snapshot=True))

    def between_steps(self, act: Callable[[], None]) -> None:
        """Run `act` on the event loop while no step is running."""
        self._between_steps.append(act)
        self._wake.set()

    # --- the engine

    async def _run_engine(self) -> None:
        while True:
            self._act()
            await self._say([])
            if self.engine.has_work:
                result = await asyncio.to_thread(self.engine.step)
                self._account(result)
                await self._say(result.replies)
            elif self.draining and not self._between_steps:
                return
            else:
                self._wake.clear()
                if not self._between_steps and not self.draining:
                    await self._wake.wait()

    def _act(self) -> None:
        while self._between_steps:
            self._between_steps.popleft()()
        for loaded, snapshot in list(self._waiting_loads.values()):
            self._install(loaded, snapshot)

    def _account(self, result: StepResult) -> None:
        self.steps += 1
        self._window.step(self.training_batch, result.running, result.prefill_tokens, result.duration_s)
        self._window.output_tokens += sum(len(r.tokens) for r in result.replies if isinstance(r, messages.Delta))

    async def _say(self, replies: list[messages.Delta | Done | Failed]) -> None:
        addressed: list[tuple[Open, messages.Reply]] = list(self._refused)
        for reply in replies:
            final = isinstance(reply, Done | Failed)
            open_ = self._open.pop(reply.id, None) if final else self._open.get(reply.id)
            self._window.finished += final
            if open_ is not None:
                addressed.append((open_, reply))
        forget, self._forget, self._refused = self._forget, [], []
        await self._outbox.put(addressed, forget)

    def _install(self, loaded: Loaded, snapshot: bool) -> None:
        """Into a free slot, then current. Without a free slot it waits; only the newest of a name does."""
        ref = loaded.ref
        self._waiting_loads.pop(ref.name, None)
        current = self.engine.versions.get(ref.name)
        if snapshot and current is not None and _order(current) >= _order(ref):
            return
        try:
            if not self.engine.load_adapter(ref, loaded.tensors, loaded.rank, loaded.alpha):
                self._waiting_loads[ref.name] = (loaded, snapshot)
                return
            self.engine.publish(ref)
        except AdapterError as error:
            log.error("adapter %s is refused: %s", ref, error)
            return
        if snapshot:
            self._snapshots += 1
        elif current != ref:
            self._published += 1

    # --- requests

    async def _intake(self) -> None:
        queue = WorkQueue(
            self.redis, self.keys.subflow(self.settings.id), GROUP, self.settings.id, AckPolicy.BY_HANDLER
        )
        await patiently(queue.create, FIRST_READ_S)

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
        pinned: Loaded | None = None
        refusal: RequestError | None = None
        try:
            request, pinned = await patiently(partial(self._with_adapter, request), FIRST_READ_S)
        except RequestError as error:
            refusal = error
        except BrokerError as error:
            refusal = Unavailable(str(error), code="broker_away")
        self.between_steps(lambda: self._admit(entry.entry_id, request, pinned, refusal))

    async def _with_adapter(self, request: Request) -> tuple[Request, Loaded | None]:
        """The request with an adapter version that can be had here, and that version if it must be loaded first.

        A version that only a dead replica had is replaced by the current one, so that its request can go on.
        """
        name, version = request.adapter, request.version
        if not name:
            return request, None
        if name not in self.engine.versions:
            current = await self.feed.current(name)
            if current is None:
                raise UnknownModel(f"no adapter {name!r}", param="model")
            if current == 0:
                self.between_steps(partial(self._serve_base_as, name))
            else:
                await self.load(name, current)
        if version is None or version == "0" or self._resident(name, version):
            return request, None
        try:
            return request, await self.feed.fetch(name, _whole(version))
        except (AdapterError, ValueError) as error:
            if not request.prefix and request.attempt == 0:
                raise UnknownModel(f"adapter {name}@v{version}: {error}", param="model") from error
            return msgspec.structs.replace(request, version=None), None

    def _serve_base_as(self, name: str) -> None:
        if name not in self.engine.versions:
            self.engine.publish(AdapterRef(name, "0"))

    def _resident(self, name: str, version: str) -> bool:
        current = self.engine.versions.get(name)
        return current is not None and current.version == version

    def _admit(self, entry_id: str, request: Request, pinned: Loaded | None, refusal: RequestError | None) -> None:
        """Between two steps. A repeated delivery of an attempt that is here is dropped, a newer attempt replaces it."""
        here = self._open.get(request.id)
        if here is not None and here.entry_id == entry_id:
            return
        if here is not None and here.attempt >= request.attempt:
            self._forget.append(entry_id)
            return
        open_ = Open(entry_id, request.ingress, request.attempt)
        try:
            if refusal is not None:
                raise refusal
            if pinned is not None and not self.engine.load_adapter(
                pinned.ref, pinned.tensors, pinned.rank, pinned.alpha
            ):
                raise Unavailable(f"no adapter slot is free for {pinned.ref}", code="adapter_slots_full")
            if request.adapter in self._waiting_loads and request.adapter not in self.engine.versions:
                raise Unavailable(f"no adapter slot is free for {request.adapter}", code="adapter_slots_full")
            self.engine.add(request)
        except RequestError as error:
            failed = Failed(request.id, request.attempt, error.status, error.code, error.message)
            self._refused.append((open_, failed))
            return
        except AdapterError as error:
            self._refused.append((open_, Failed(request.id, request.attempt, 404, "adapter_unfit", str(error))))
            return
        finally:
            if pinned is not None:
                self.engine.discard(pinned.ref)
        if here is not None:
            self._forget.append(here.entry_id)
        self._open[request.id] = open_

    # --- telemetry

    async def _report(self) -> None:
        async for now in ticks(self.settings.report_s, self.clock):
            try:
                await self._report_once(now)
            except AWAY as error:
                log.warning("telemetry: broker away: %s", error)

    async def _report_once(self, now: float) -> None:
        info = await self._registry.replica(self.settings.id)
        if info is None:
            return
        window, self._window = self._window, Window(self.clock.monotonic())
        busy, mean_batch = window.fractions(self._window.start_s)
        report = InferenceReport(
            replica=self.settings.id,
            state=info.state,
            time_s=now,
            utilisation=self.utilisation.read(busy),
            memory_bytes=self.utilisation.memory_bytes(),
            queue=self.engine.waiting,
            running=self.engine.running,
            mean_batch=mean_batch,
            limit=self.engine.limit,
            train_batch=self.training_batch,
            iterations=window.samples(),
            prefill_tokens=window.prefill_tokens,
            prefill_s=window.prefill_s,
            output_tokens=window.output_tokens,
            finished=window.finished,
            snapshots=self._snapshots,
            published=self._published,
            versions={name: ref.version for name, ref in self.engine.versions.items()},
        )
        await post.report(self.redis, self.keys, report)


def _order(ref: AdapterRef) -> tuple[int, ...]:
    return tuple(int(part) for part in ref.version.split("."))


def _whole(version: str) -> int:
    """The version in Redis; ValueError for a replica's own snapshot, which is nowhere else."""
    return int(version)
