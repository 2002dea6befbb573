"""Adapter versions in the engine: made current between two steps, or fetched for the one request that asks for it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

import msgspec

from collm_common.broker import patiently
from collm_common.errors import AdapterError, CollmError, UnknownModel
from collm_common.messages import Request
from collm_common.types import AdapterRef
from collm_replica.adapter_feed import AdapterFeed, Loaded
from collm_replica.engine.protocol import InferenceEngine, Staged

log = logging.getLogger(__name__)

FETCH_S = 60.0


class Versions:
    """Changes the engine only through `between_steps`; `snapshots` and `published` count what became current."""

    def __init__(
        self, engine: InferenceEngine, feed: AdapterFeed, between_steps: Callable[[Callable[[], None]], None]
    ) -> None:
        self._engine, self._feed, self._between_steps = engine, feed, between_steps
        self._waiting: dict[str, tuple[Staged, bool]] = {}
        self._expected: Counter[str] = Counter()
        self.snapshots = self.published = 0

    async def load(self, name: str, version: int) -> None:
        """Fetch a published version and make it current; one that does not fit is refused and logged."""
        if version == 0:
            self._between_steps(lambda: self._engine.publish(AdapterRef(name, "0")))
            return
        try:
            staged = await self._stage(await patiently(lambda: self._feed.fetch(name, version), FETCH_S))
        except CollmError as error:
            log.error("adapter %s@v%d is not loaded: %s", name, version, error)
            return
        self._between_steps(lambda: self._install(staged, snapshot=False))

    def unload(self, name: str) -> None:
        """Forget an adapter; requests that are here keep it to their end."""

        def act() -> None:
            self._waiting.pop(name, None)
            self._engine.retire(name)

        self._between_steps(act)

    def expect(self, request: Request) -> None:
        """A request is on its way: the current version of its adapter stays until `arrived`."""
        self._expected[request.adapter] += 1

    def arrived(self, request: Request) -> None:
        """It is about to enter the engine, or is refused."""
        self._expected[request.adapter] -= 1
        self._expected += Counter()

    def put(self, staged: Staged) -> bool:
        """Between two steps: into a slot, for the one request that asks for it; False if none is free."""
        return self._engine.load_adapter(staged, set(self._expected))

    async def take_snapshot(self, loaded: Loaded) -> None:
        """Make a training snapshot current, unless something newer already is; one that does not fit is logged."""
        try:
            staged = await self._stage(loaded)
        except AdapterError as error:
            log.error("snapshot %s is not taken: %s", loaded.ref, error)
            return
        self._between_steps(lambda: self._install(staged, snapshot=True))

    def install_waiting(self) -> None:
        """Between two steps: into slots that have become free."""
        for staged, snapshot in list(self._waiting.values()):
            self._install(staged, snapshot)

    def lacks_slot(self, name: str) -> bool:
        """Whether no version of an adapter could be made current yet because no slot was free."""
        return name in self._waiting and name not in self._engine.versions

    async def pin(self, request: Request) -> tuple[Request, Staged | None]:
        """The request with an adapter version that can be had here, and that version if it must be loaded first.

        A version that only a dead replica had is replaced by the current one, so that its request can go on. Raises
        UnknownModel.
        """
        name, version = request.adapter, request.version
        if not name:
            return request, None
        if version == "0" or (version is not None and self._resident(name, version)):
            return request, None
        if version is not None:
            try:
                return request, await self._stage(await self._feed.fetch(name, _whole(version)))
            except (AdapterError, ValueError) as error:
                if not request.prefix and request.attempt == 0:
                    raise UnknownModel(f"adapter {name}@v{version}: {error}", param="model") from error
                request = msgspec.structs.replace(request, version=None)
        if name not in self._engine.versions:
            await self._introduce(name)
        return request, None

    async def _introduce(self, name: str) -> None:
        current = await self._feed.current(name)
        if current is None:
            raise UnknownModel(f"no adapter {name!r}", param="model")
        if current == 0:
            self._between_steps(partial(self._serve_base_as, name))
        else:
            await self.load(name, current)

    def _serve_base_as(self, name: str) -> None:
        if name not in self._engine.versions:
            self._engine.publish(AdapterRef(name, "0"))

    def _resident(self, name: str, version: str) -> bool:
        current = self._engine.versions.get(name)
        return current is not None and current.version == version

    async def _stage(self, loaded: Loaded) -> Staged:
        return await asyncio.to_thread(self._engine.stage, loaded.ref, loaded.tensors, loaded.rank, loaded.alpha)

    def _install(self, staged: Staged, snapshot: bool) -> None:
        """Into a free slot, then current. Without a free slot it waits; only the newest of a name does."""
        ref = staged.ref
        self._waiting.pop(ref.name, None)
        current = self._engine.versions.get(ref.name)
        if snapshot and current is not None and _order(current) >= _order(ref):
            return
        if not self._engine.load_adapter(staged, self._expected.keys() - {ref.name}):
            self._waiting[ref.name] = (staged, snapshot)
            return
        self._engine.publish(ref)
        if snapshot:
            self.snapshots += 1
        elif current != ref:
            self.published += 1


def _order(ref: AdapterRef) -> tuple[int, ...]:
    return tuple(int(part) for part in ref.version.split("."))


def _whole(version: str) -> int:
    """The version in Redis; ValueError for a replica's own snapshot, which is nowhere else."""
    return int(version)
