"""Replicas that answer a job's commands at once, and services that run beside a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

from redis.asyncio import Redis

from collm_common import blobs, messages, streams
from collm_common.broker import stop_all
from collm_common.clock import SystemClock, ticks
from collm_common.keys import Keys
from collm_common.messages import (
    Aggregate,
    Aggregated,
    AnyMessage,
    Evaluate,
    Evaluated,
    InferenceReport,
    TrainReport,
    TrainRound,
    UpdateUploaded,
)
from collm_common.registry import Registry
from collm_common.streams import Tail
from collm_common.types import Quality, ReplicaInfo, ReplicaState
from collm_launcher.policy.idle import IdleRules
from collm_launcher.policy.job import Rules
from collm_launcher.settings import LauncherSettings

MODEL, ADAPTER = "m", "desk"
LOSSES = {0: 4.0, 1: 3.0, 2: 2.5}
RULES = Rules(rounds=2, steps=2, patience=0)


def settings(**changes: object) -> LauncherSettings:
    base: dict[str, object] = {
        "adapters": {MODEL: ADAPTER},
        "idle": IdleRules(window=2, return_ticks=200),
        "rules": RULES,
        "tick_s": 0.02,
        "cooldown_s": 600.0,
    }
    return LauncherSettings(**{**base, **changes})  # type: ignore[arg-type]


class SimReplica:
    """A registered replica without load. While `going` is cleared it keeps its rounds to itself."""

    def __init__(self, redis: Redis, keys: Keys, id_: str) -> None:
        self.redis, self.keys, self.id = redis, keys, id_
        self.registry = Registry(redis, keys)
        self.going = asyncio.Event()
        self.going.set()
        self.heard: list[AnyMessage] = []
        self._rounds: asyncio.Queue[TrainRound] = asyncio.Queue()

    async def register(self) -> None:
        state = ReplicaState.SERVING
        info = ReplicaInfo(self.id, MODEL, "i", state, ready=True, infer_batch_max=8, context_tokens=64)
        await self.registry.register(info, lease_ttl_s=600)

    async def die(self) -> None:
        """Its lease runs out and it answers no more."""
        self.going.clear()
        await self.redis.delete(self.keys.lease(self.id))

    async def run(self) -> None:
        tail = Tail(self.redis, self.keys.control(self.id))
        await tail.start("0")
        while True:
            for entry in await tail.read(16):
                message = messages.decode(entry.data)
                self.heard.append(message)
                await self.answer(message)

    async def train(self) -> None:
        while True:
            task = await self._rounds.get()
            await self.going.wait()
            await self.upload(task)

    async def upload(self, task: TrainRound) -> None:
        await blobs.put(self.redis, self.keys.update(task.job, task.round, self.id), b"update", b"meta")
        uploaded = UpdateUploaded(
            job=task.job,
            round=task.round,
            replica=self.id,
            samples=8,
            loss=2.0,
            loss_last=2.0,
            time_s=SystemClock().now(),
        )
        await self.registry.announce(uploaded, task.job)

    async def report(self) -> None:
        async for now in ticks(0.01, SystemClock()):
            await self.report_quiet(now)

    async def report_quiet(self, now: float) -> None:
        quiet = InferenceReport(
            replica=self.id,
            state=ReplicaState.SERVING,
            time_s=now,
            utilisation=0,
            memory_bytes=0,
            queue=0,
            running=0,
            mean_batch=0,
            limit=8,
            train_batch=0,
        )
        await self.measured(quiet)

    async def measured(self, message: InferenceReport | TrainReport) -> None:
        kind, data = messages.kind(message), messages.encode(message)
        await streams.append(self.redis, self.keys.telemetry, kind, self.id, data)

    async def answer(self, message: AnyMessage) -> None:
        now = SystemClock().now()
        match message:
            case TrainRound():
                self._rounds.put_nowait(message)
            case Aggregate(job=job, round=number, adapter=adapter, version=version):
                await blobs.put(self.redis, self.keys.adapter_version(adapter, version), b"weights", b"meta")
                done = Aggregated(job=job, round=number, adapter=adapter, version=version, residual=0.0, time_s=now)
                await self.registry.announce(done, job)
            case Evaluate(job=job, round=number, adapter=adapter, version=version):
                evaluated = Evaluated(
                    job=job,
                    round=number,
                    replica=self.id,
                    adapter=adapter,
                    version=version,
                    quality=Quality(LOSSES.get(version, 2.0), 10),
                    time_s=now,
                )
                await self.registry.announce(evaluated, job)

    def told(self, type_: type[AnyMessage]) -> list[AnyMessage]:
        return [message for message in self.heard if isinstance(message, type_)]


@asynccontextmanager
async def replicas(
    redis: Redis, keys: Keys, ids: Sequence[str] = ("r1", "r2", "r3")
) -> AsyncIterator[list[SimReplica]]:
    """Registered and running."""
    members = [SimReplica(redis, keys, id_) for id_ in ids]
    for member in members:
        await member.register()
    tasks = [
        asyncio.create_task(loop) for member in members for loop in (member.run(), member.train(), member.report())
    ]
    try:
        yield members
    finally:
        await stop_all(*tasks)


class Service(Protocol):
    """What launcher and coordinator have in common."""

    stop: asyncio.Event

    async def run(self) -> None:
        """Until `stop`."""


@asynccontextmanager
async def running(*services: Service) -> AsyncIterator[None]:
    """Run services; at the end they stop by themselves."""
    async with AsyncExitStack() as stack:
        for service in services:
            task = asyncio.create_task(service.run())
            stack.push_async_callback(_finish, service, task)
        yield


async def _finish(service: Service, task: asyncio.Task[None]) -> None:
    service.stop.set()
    async with asyncio.timeout(20):
        await task


async def events(redis: Redis, keys: Keys) -> list[AnyMessage]:
    """Everything that was announced, oldest first; `noise` is not."""
    entries = streams.parse(keys.events, await redis.xrange(keys.events))
    return [messages.decode(entry.data) for entry in entries if entry.kind != "noise"]
