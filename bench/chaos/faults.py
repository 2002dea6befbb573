"""The faults: each takes a cell, does its damage, ends it, and returns. What was killed is started again by others."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import psutil

from bench.chaos.cell import DISPATCHERS, REPLICAS, Cell

SHORT_S, LONG_S = 1.0, 4.0
DELAY_S = 0.1
CLOCK_STEPS_S = (-90, -20, 20, 90)
SERVICE_LIMIT_S, MODEL_LIMIT_S = 10.0, 30.0
SERVICES = (*DISPATCHERS, *(f"replica-{replica}" for replica in REPLICAS), "launcher", "coordinator")


async def _at_once() -> bool:
    return True


@dataclass(frozen=True)
class Damage:
    """Whom a fault hit, and whether its successor works, where that is not seen from the cell being whole."""

    whom: str
    healed: Callable[[], Awaitable[bool]] = _at_once


Act = Callable[[Cell, random.Random], Awaitable[Damage]]


@dataclass(frozen=True)
class Fault:
    """`limit_s` bounds the time from the fault's end until every service works: longer where a model must load.

    `possible` says why this machine or user cannot bring it about, "" if it can.
    """

    name: str
    act: Act
    limit_s: float = SERVICE_LIMIT_S
    possible: Callable[[Cell], str] = lambda cell: ""


async def kill_inference(cell: Cell, rng: random.Random) -> Damage:
    """An inference process: the model must be loaded again."""
    return _kill_child(cell, rng.choice(REPLICAS), "inference")


async def kill_training(cell: Cell, rng: random.Random) -> Damage:
    """A fine-tuning process."""
    return _kill_child(cell, rng.choice(REPLICAS), "training")


async def kill_supervisor(cell: Cell, rng: random.Random) -> Damage:
    """A whole replica: its children follow their supervisor."""
    return _kill(cell, f"replica-{rng.choice(REPLICAS)}")


async def kill_launcher(cell: Cell, rng: random.Random) -> Damage:
    """The launcher, in whatever phase its job is."""
    return await _kill_leading(cell, "launcher", "launcher")


async def kill_coordinator(cell: Cell, rng: random.Random) -> Damage:
    """The coordinator."""
    return await _kill_leading(cell, "coordinator", "coordinator")


async def kill_leader(cell: Cell, rng: random.Random) -> Damage:
    """The dispatcher that leads, with its HTTP service."""
    return await _kill_leading(cell, await cell.dispatch_leader(), "dispatch:tiny")


async def kill_follower(cell: Cell, rng: random.Random) -> Damage:
    """The dispatcher that does not lead: its HTTP service has clients all the same."""
    leader = await cell.dispatch_leader()
    return _kill(cell, next(name for name in DISPATCHERS if name != leader))


async def restart_broker(cell: Cell, rng: random.Random) -> Damage:
    """Killed, and started again at once with all that it had written."""
    await asyncio.to_thread(cell.broker.stop, signal.SIGKILL)
    await asyncio.to_thread(cell.broker.start)
    return Damage("broker")


async def restart_broker_without_its_last_second(cell: Cell, rng: random.Random) -> Damage:
    """As a power cut leaves it: what was written within the last second before the kill is gone."""
    files = sorted((cell.broker.folder / "appendonlydir").glob("*.incr.aof"))
    before = files[-1].stat().st_size
    await asyncio.sleep(SHORT_S)
    await asyncio.to_thread(cell.broker.stop, signal.SIGKILL)
    with suppress(FileNotFoundError):
        os.truncate(files[-1], before)
    await asyncio.to_thread(cell.broker.start)
    return Damage("broker")


async def stop_broker(cell: Cell, rng: random.Random) -> Damage:
    """SIGSTOP: its connections stay open and nothing answers."""
    assert cell.broker.process is not None
    await _pause(psutil.Process(cell.broker.process.pid), rng)
    return Damage("broker")


async def stop_inference(cell: Cell, rng: random.Random) -> Damage:
    """SIGSTOP of an inference process."""
    replica = rng.choice(REPLICAS)
    await _pause(cell.child(replica, "inference"), rng)
    return Damage(f"{replica} inference")


async def stop_supervisor(cell: Cell, rng: random.Random) -> Damage:
    """SIGSTOP of a supervisor, for longer than its lease at times: others take it for dead while its engine runs."""
    name = f"replica-{rng.choice(REPLICAS)}"
    await _pause(cell.process(name), rng, LONG_S * 2)
    return Damage(name)


async def stop_leader(cell: Cell, rng: random.Random) -> Damage:
    """SIGSTOP of the dispatcher that leads, for longer than its lease at times."""
    leader = await cell.dispatch_leader()
    await _pause(cell.process(leader), rng)
    return Damage(leader)


async def cut_connections(cell: Cell, rng: random.Random) -> Damage:
    """Every connection of one service to the broker is reset."""
    name = rng.choice(SERVICES)
    cell.proxies[name].cut()
    return Damage(name)


async def cut_all_connections(cell: Cell, rng: random.Random) -> Damage:
    """Every connection to the broker is reset."""
    for proxy in cell.proxies.values():
        proxy.cut()
    return Damage("all")


async def delay(cell: Cell, rng: random.Random) -> Damage:
    """Each packet between one service and the broker takes DELAY_S longer."""
    name = rng.choice(SERVICES)
    proxy = cell.proxies[name]
    proxy.delay_s = DELAY_S
    await asyncio.sleep(rng.uniform(SHORT_S, LONG_S))
    proxy.delay_s = 0.0
    return Damage(name)


async def partition(cell: Cell, rng: random.Random) -> Damage:
    """Nothing passes between one service and the broker, and no connection breaks; later all of it arrives."""
    name = rng.choice(SERVICES)
    proxy = cell.proxies[name]
    proxy.withhold()
    await asyncio.sleep(rng.uniform(SHORT_S, 2 * LONG_S))
    proxy.let_through()
    return Damage(name)


async def fill_disk(cell: Cell, rng: random.Random) -> Damage:
    """The broker's disk is full for a while, so that it cannot append."""
    assert cell.disk is not None
    filler = cell.disk / "filler"
    with filler.open("wb") as file, suppress(OSError):
        while True:
            file.write(b"\0" * 2**16)
            file.flush()
    await asyncio.sleep(rng.uniform(SHORT_S, LONG_S))
    filler.unlink()
    return Damage("broker")


async def step_clock(cell: Cell, rng: random.Random) -> Damage:
    """The wall clock of one service jumps, and jumps back later."""
    name = rng.choice(SERVICES)
    assert cell.clocks is not None
    cell.clocks.step(name, rng.choice(CLOCK_STEPS_S))
    await asyncio.sleep(rng.uniform(SHORT_S, LONG_S))
    cell.clocks.step(name, 0)
    return Damage(name)


FAULTS = (
    Fault("kill -9 inference process", kill_inference, MODEL_LIMIT_S),
    Fault("kill -9 fine-tuning process", kill_training, MODEL_LIMIT_S),
    Fault("kill -9 supervisor", kill_supervisor, MODEL_LIMIT_S),
    Fault("kill -9 launcher", kill_launcher),
    Fault("kill -9 coordinator", kill_coordinator),
    Fault("kill -9 dispatcher that leads", kill_leader),
    Fault("kill -9 other dispatcher", kill_follower),
    Fault("kill -9 broker", restart_broker),
    Fault("kill -9 broker, last second lost", restart_broker_without_its_last_second),
    Fault("SIGSTOP broker", stop_broker),
    Fault("SIGSTOP inference process", stop_inference),
    Fault("SIGSTOP supervisor", stop_supervisor, MODEL_LIMIT_S),
    Fault("SIGSTOP dispatcher that leads", stop_leader),
    Fault("reset one service's connections", cut_connections),
    Fault("reset all connections", cut_all_connections),
    Fault("delay one service's packets", delay),
    Fault("withhold one service's packets", partition, MODEL_LIMIT_S),
    Fault("full disk of the broker", fill_disk, possible=lambda cell: "" if cell.disk else "needs to mount a tmpfs"),
    Fault("step of one clock", step_clock, possible=lambda cell: "" if cell.clocks else "needs a C compiler"),
)


async def _kill_leading(cell: Cell, name: str, lease: str) -> Damage:
    """Healed once another process leads in its place."""
    before = await cell.redis.get(cell.keys.lease(lease))
    _kill(cell, name)

    async def another_leads() -> bool:
        return await cell.redis.get(cell.keys.lease(lease)) not in (None, before)

    return Damage(name, another_leads)


def _kill(cell: Cell, name: str) -> Damage:
    process = cell.process(name)
    if process is not None:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return Damage(name)


def _kill_child(cell: Cell, replica: str, module: str) -> Damage:
    """Healed once there is another, which the cell's being whole finds to be at work."""
    child = cell.child(replica, module)
    if child is not None:
        with suppress(psutil.NoSuchProcess):
            child.kill()

    async def another_runs() -> bool:
        now = cell.child(replica, module)
        return now is not None and (child is None or now.pid != child.pid)

    return Damage(f"{replica} {module}", another_runs)


async def _pause(process: psutil.Process | None, rng: random.Random, most_s: float = LONG_S) -> None:
    if process is None:
        return
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        await asyncio.sleep(rng.uniform(SHORT_S, most_s))
        process.resume()
