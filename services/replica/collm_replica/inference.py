"""`python -m collm_replica.inference CHANNEL_FD WEIGHTS_FD`: the process that owns the weights and answers requests."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import uvloop
from msgspec import Struct

from collm_common import logs
from collm_common.broker import connection, patiently, stop_all
from collm_common.clock import SystemClock
from collm_common.errors import AdapterError, BrokerError, BrokerFault
from collm_common.messages import Cancel, Configure, LoadAdapter, Request, UnloadAdapter
from collm_common.settings import load
from collm_common.tracing import tracer
from collm_common.types import AdapterRef, SamplingParams, Slo
from collm_replica.adapter_feed import AdapterFeed, Decode, Loaded
from collm_replica.channel import (
    Alive,
    Channel,
    DigestReply,
    DigestRequest,
    Drain,
    ExportReply,
    ExportRequest,
    Ready,
    Snapshot,
    Training,
    Yield,
)
from collm_replica.child import die_with_parent
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.protocol import InferenceEngine, Tensors
from collm_replica.serving import Serving
from collm_replica.settings import ReplicaSettings
from collm_replica.telemetry import CpuUtilisation, Utilisation

log = logging.getLogger(__name__)

ALIVE_S = 0.5


class Loadout(Struct):
    """What serves: an engine, its weights' digest, their export (None on a CPU), and how adapters are read.

    It is warmed up with a prompt of `warm_up_tokens`, and under the adapter `blank` if that is not empty.
    """

    engine: InferenceEngine
    utilisation: Utilisation
    digest: Callable[[], str]
    export: Callable[[], bytes] | None
    decode: Decode
    read_file: Callable[[Path], Tensors]
    warm_up_tokens: int = 3
    blank: Tensors = {}


def engine_config(settings: ReplicaSettings) -> EngineConfig:
    """The engine's bounds, from the settings."""
    return EngineConfig(
        max_batch=settings.max_batch,
        block_tokens=settings.block_tokens,
        kv_bytes=settings.kv_mb << 20,
        step_tokens=max(settings.step_tokens, settings.max_batch),
        slots=settings.slots,
        max_rank=settings.max_rank,
        context_tokens=settings.context_tokens,
        max_waiting=settings.max_waiting,
        prefix_cache=settings.prefix_cache,
    )


def fake(settings: ReplicaSettings) -> Loadout:
    """An engine that loads no torch and no model."""
    from collm_replica.engine.fake import FakeEngine

    engine = FakeEngine(engine_config(settings), iteration_s=lambda sequences, tokens: settings.fake_step_s)
    return Loadout(engine, CpuUtilisation(), lambda: "fake", None, lambda data, manifest: {}, lambda path: {})


def warm_up(engine: InferenceEngine, prompt_tokens: int, blank: Tensors) -> None:
    """A real request to its end: readiness means that a step was done, and had the memory for it.

    With `blank` another one is answered under that adapter, so that nobody waits for what has to be compiled.
    """
    _answer(engine, prompt_tokens)
    if blank:
        ref = AdapterRef("warm-up", "1")
        engine.load_adapter(engine.stage(ref, blank, 1, 1.0))
        engine.publish(ref)
        _answer(engine, prompt_tokens, ref.name)
        engine.retire(ref.name)


def _answer(engine: InferenceEngine, prompt_tokens: int, adapter: str = "") -> None:
    request = Request(
        id="warm-up",
        ingress="none",
        model="none",
        prompt=(1,) * prompt_tokens,
        sampling=SamplingParams(max_tokens=2, ignore_eos=True),
        slo=Slo("none"),
        arrival_s=0.0,
        deadline_s=float("inf"),
        adapter=adapter,
    )
    engine.add(request)
    while engine.has_work:
        engine.step()


async def restore(serving: Serving, feed: AdapterFeed, settings: ReplicaSettings) -> None:
    """Make current what is current in the cell. Waits for a broker that is away: to end would load the model again.

    Raises BrokerError if it stays away for half of `start_timeout_s`.
    """

    async def current() -> dict[str, int | None]:
        return {name: await feed.current(name) for name in await feed.names(settings.served_name)}

    try:
        found = await patiently(current, settings.start_timeout_s / 2)
    except BrokerFault as error:
        log.error("each adapter is loaded when a request asks for it: %s", error)
        return
    for name, version in found.items():
        if version is not None:
            await serving.versions.load(name, version)


async def listen(channel: Channel, serving: Serving, loadout: Loadout) -> None:
    """Carry out what the supervisor says until it is gone."""
    while (message := await channel.receive()) is not None:
        match message:
            case Cancel():
                serving.cancel(message.id)
            case Configure():
                serving.limit(message.sizes.infer)
            case LoadAdapter():
                await serving.versions.load(message.name, message.version)
            case UnloadAdapter():
                serving.versions.unload(message.name)
            case Training():
                serving.reports.training = message
            case Snapshot():
                await take_snapshot(message, serving, loadout)
            case DigestRequest():
                await channel.send(DigestReply(digest=await asyncio.to_thread(loadout.digest)))
            case ExportRequest() if loadout.export is not None:
                await channel.send(ExportReply(weights=loadout.export()))
            case Drain():
                serving.drain()
            case _:
                log.error("unexpected %s", type(message).__name__)


async def take_snapshot(message: Snapshot, serving: Serving, loadout: Loadout) -> None:
    """A file that cannot be read costs only this snapshot."""
    path = Path(message.path)
    try:
        tensors = await asyncio.to_thread(loadout.read_file, path)
    except AdapterError as error:
        log.error("snapshot %s is not taken: %s", message.ref, error)
        return
    finally:
        path.unlink(missing_ok=True)
    await serving.versions.take_snapshot(Loaded(message.ref, tensors, message.rank, message.alpha))


async def say_alive(channel: Channel, serving: Serving) -> None:
    """Tell the supervisor that steps are made, or that there is nothing to do."""
    while True:
        await channel.send(Alive(progress=serving.steps, busy=serving.busy))
        await asyncio.sleep(ALIVE_S)


async def say_pressure(channel: Channel, serving: Serving) -> None:
    """Tell the supervisor, as soon as it changes, whether fine-tuning must let decoding go first."""
    while True:
        await serving.pressure_changed.wait()
        serving.pressure_changed.clear()
        await channel.send(Yield(wanted=serving.pressure.high))


async def run(settings: ReplicaSettings, channel_fd: int, weights_fd: int) -> None:
    """Load, warm up, restore adapters, then serve until drained."""
    channel = await Channel.over(socket.socket(fileno=channel_fd))
    started_s = time.monotonic()
    if settings.engine == "fake":
        loadout = fake(settings)
    else:
        from collm_replica.loading import load_model

        loadout = await asyncio.to_thread(load_model, settings, weights_fd)
    await asyncio.to_thread(warm_up, loadout.engine, loadout.warm_up_tokens, loadout.blank)
    digest = await asyncio.to_thread(loadout.digest)
    log.info("ready to serve after %.1f s", time.monotonic() - started_s)
    async with connection(settings.redis_url) as redis:
        feed = AdapterFeed(redis, settings.keys, digest, loadout.decode)
        spans = tracer("replica", settings.id, settings.otlp_endpoint)
        serving = Serving(settings, redis, loadout.engine, feed, loadout.utilisation, SystemClock(), spans)
        await restore(serving, feed, settings)
        ready = Ready(
            base_digest=digest,
            context_tokens=settings.context_tokens,
            infer_batch_max=settings.max_batch,
            on_device=loadout.export is not None,
        )
        await channel.send(ready)
        loops = (listen(channel, serving, loadout), say_alive(channel, serving), say_pressure(channel, serving))
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            await serving.run()
        finally:
            await stop_all(*tasks)


def main() -> None:
    """Ends with its supervisor, and leaves Ctrl-C to it."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    settings = load(ReplicaSettings, "replica")
    logs.setup(f"replica {settings.id} inference", settings.log_level, settings.log_json)
    try:
        uvloop.run(run(settings, int(sys.argv[1]), int(sys.argv[2])))
    except BrokerError as error:
        log.error("%s", error)
        sys.exit(1)


if __name__ == "__main__":
    main()
