"""Killed in each phase of a round: client, server, launcher, coordinator and broker."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import pytest
from redis.asyncio import Redis

from collm_common import blobs, messages
from collm_common.broker import connection, patiently, stop_all
from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_common.messages import (
    AdapterPublished,
    Aggregate,
    AnyMessage,
    Evaluate,
    JobChanged,
    TrainRound,
)
from collm_common.registry import Registry
from collm_common.streams import Tail
from collm_common.types import ReplicaState
from collm_coordinator.service import Coordinator
from collm_coordinator.settings import CoordinatorSettings
from collm_launcher.policy.idle import IdleRules
from collm_launcher.service import Launcher
from tests.launcher.support import ADAPTER, RULES, Service, SimReplica, events, settings
from tests.support.broker import Broker
from tests.support.waiting import eventually

IDS = ("r1", "r2", "r3")
SERVER, CLIENT = "r1", "r2"
PHASES = ("broadcast", "training", "upload", "aggregation", "publish")
LEASE_S = 0.4
CLOCK = SystemClock()
T = TypeVar("T")


@pytest.fixture
def own_broker() -> Iterator[Broker]:
    server = Broker()
    server.start()
    yield server
    server.close()


class Halting(SimReplica):
    """Stops at `phase` of the first round, halfway through, until `going`; it outlives the broker."""

    def __init__(self, redis: Redis, keys: Keys, id_: str, phase: str) -> None:
        super().__init__(redis, keys, id_)
        self.phase, self.stands = phase, False
        self.going.clear()
        self._loops: list[asyncio.Task[None]] = []

    def live(self) -> None:
        self._loops = [asyncio.create_task(loop) for loop in (self.run(), self.report())]

    async def kill(self) -> None:
        """Whatever it was writing stays half written."""
        await stop_all(*self._loops)
        await self.redis.delete(self.keys.lease(self.id))

    async def run(self) -> None:
        tail = Tail(self.redis, self.keys.control(self.id))
        await tail.start("0")
        while True:
            for entry in await once_more(lambda: tail.read(16)):
                message = messages.decode(entry.data)
                self.heard.append(message)
                await once_more(partial(self.obey, message))

    async def report(self) -> None:
        while True:
            await once_more(lambda: self.report_quiet(CLOCK.now()))
            await CLOCK.sleep(0.02)

    async def obey(self, message: AnyMessage) -> None:
        match message:
            case TrainRound():
                await self._stand("broadcast")
                await self._stand("training")
                await self._write_half(self.keys.update(message.job, message.round, self.id), "upload")
                await self.upload(message)
            case Aggregate():
                await self._write_half(self.keys.adapter_version(message.adapter, message.version), "aggregation")
                await self.answer(message)
            case Evaluate(version=version):
                if version:
                    await self._stand("publish")
                await self.answer(message)

    async def _write_half(self, key: str, phase: str) -> None:
        if phase == self.phase and not self.stands:
            await self.redis.hset(key, "chunk:0", b"half")
            await self._stand(phase)

    async def _stand(self, phase: str) -> None:
        if phase == self.phase:
            self.stands = True
            await self.going.wait()


async def once_more(step: Callable[[], Awaitable[T]]) -> T:
    """Through a broker that is away."""
    return await patiently(step, 20)


class Cell:
    """Launcher, coordinator and three replicas, of which each can be killed; a killed service is replaced."""

    def __init__(self, broker: Broker, redis: Redis, keys: Keys, phase: str) -> None:
        self.broker, self.redis, self.keys = broker, redis, keys
        self.replicas = {id_: Halting(redis, keys, id_, phase) for id_ in IDS}
        self._services: dict[str, asyncio.Task[None]] = {}

    async def begin(self) -> None:
        for replica in self.replicas.values():
            await replica.register()
            replica.live()
        for name in ("launcher", "coordinator"):
            self._serve(name)

    async def end(self) -> None:
        await stop_all(*self._services.values())
        for replica in self.replicas.values():
            await replica.kill()

    async def kill(self, victim: str) -> None:
        match victim:
            case "client" | "server":
                await self.replicas[SERVER if victim == "server" else CLIENT].kill()
            case "broker":
                self.broker.stop(signal.SIGKILL)
                self.broker.start()
            case _:
                await stop_all(self._services[victim])
                self._serve(victim)

    def go_on(self) -> None:
        for replica in self.replicas.values():
            replica.going.set()

    def stands(self) -> bool:
        """Whether everybody who works in this phase stands in it."""
        standing = {id_ for id_, replica in self.replicas.items() if replica.stands}
        return standing == ({SERVER} if self.replicas[SERVER].phase == "aggregation" else set(IDS))

    async def ended(self) -> str | None:
        told = await once_more(lambda: events(self.redis, self.keys))
        heard = [event for event in told if isinstance(event, JobChanged)]
        return next((event.status for event in heard if event.status in ("done", "failed")), None)

    async def all_serve(self) -> bool:
        infos = (await once_more(Registry(self.redis, self.keys).replicas)).values()
        return all(info.state is ReplicaState.SERVING and not info.job for info in infos if info.alive)

    def _serve(self, name: str) -> None:
        """A cancelled task runs no farewell: its lease stays until it runs out, as after SIGKILL."""
        service: Service
        if name == "launcher":
            idle = IdleRules(window=2, return_ticks=200)
            service = Launcher(settings(lease_ttl_s=LEASE_S, idle=idle), self.redis, CLOCK)
        else:
            service = Coordinator(CoordinatorSettings(lease_ttl_s=LEASE_S), self.redis, CLOCK)
        self._services[name] = asyncio.create_task(service.run())


@asynccontextmanager
async def cell(broker: Broker, keys: Keys, phase: str) -> AsyncIterator[Cell]:
    async with connection(broker.url) as redis:
        made = Cell(broker, redis, keys, phase)
        await made.begin()
        try:
            yield made
        finally:
            await made.end()


@pytest.mark.parametrize("victim", ["client", "server", "launcher", "coordinator", "broker"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_kill_in_any_phase_costs_neither_the_job_nor_a_replica(
    own_broker: Broker, keys: Keys, phase: str, victim: str
) -> None:
    """A job that hangs, a replica that is never given back, or a version that is published half written."""
    async with cell(own_broker, keys, phase) as one:
        await eventually(one.stands, within_s=40)
        await one.kill(victim)
        one.go_on()
        await eventually(one.ended, within_s=40)
        await eventually(one.all_serve, within_s=40)
        assert await one.ended() == "done"
        heard = await events(one.redis, keys)
        published = [event.version for event in heard if isinstance(event, AdapterPublished)]
        assert len(published) == RULES.rounds
        assert await one.redis.hget(keys.adapter(ADAPTER), "version") == str(published[-1]).encode()
        stored = [key.decode() async for key in one.redis.scan_iter(f"{keys.adapter(ADAPTER)}:v*")]
        assert sorted(stored) == sorted(keys.adapter_version(ADAPTER, version) for version in published)
        for key in stored:
            assert await blobs.get(one.redis, key) == (b"weights", b"meta")
        assert not [key async for key in one.redis.scan_iter(f"{keys.job('*')}:*")], "an update that nobody removes"
        started = [len(replica.told(TrainRound)) for replica in one.replicas.values()]
        assert max(started) == RULES.rounds, "a round that was begun twice"
