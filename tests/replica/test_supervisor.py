"""A whole replica as processes, with an engine that needs no model: deaths, drains, commands, uploads."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.clock import SystemClock
from collm_common.errors import ModelError
from collm_common.keys import Keys
from collm_common.messages import (
    AnyMessage,
    Cancel,
    Configure,
    Delta,
    Done,
    Evaluate,
    Hyperparams,
    Leave,
    Lost,
    TaskFailed,
)
from collm_common.registry import Registry
from collm_common.types import BatchSizes, ReplicaInfo, ReplicaState, SamplingParams
from collm_replica.settings import ReplicaSettings
from collm_replica.supervisor import Supervisor
from tests.replica.support import replies, request, send
from tests.support.broker import Broker
from tests.support.waiting import eventually

LONG = SamplingParams(max_tokens=900)


def options(monkeypatch: pytest.MonkeyPatch, broker: Broker, data: Path, **changes: str) -> ReplicaSettings:
    """Settings through the environment, which the children inherit."""
    values = {"ID": "r1", "MODEL": "none", "SERVED_NAME": "m", "ENGINE": "fake", "FAKE_STEP_S": "0.005"}
    values |= {"DATA_DIR": str(data), "REPORT_S": "0.2", "RESTART_BACKOFF_S": "0.05", "LEASE_TTL_S": "1"}
    monkeypatch.setenv("COLLM_REDIS_URL", broker.url)
    for name, value in (values | changes).items():
        monkeypatch.setenv(f"COLLM_REPLICA_{name}", value)
    from collm_common.settings import load

    return load(ReplicaSettings, "replica")


@asynccontextmanager
async def running(redis: Redis, settings: ReplicaSettings) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(settings, redis, SystemClock())
    task = asyncio.create_task(supervisor.run())
    try:
        await eventually(lambda: task.done() or _info(redis, settings, ready=True), within_s=30)
        assert not task.done(), task.exception()
        yield supervisor
    finally:
        supervisor.stop.set()
        await asyncio.wait_for(task, 30)


async def _info(redis: Redis, settings: ReplicaSettings, ready: bool | None = None) -> ReplicaInfo | None:
    info = (await Registry(redis, settings.keys).replicas()).get("r1")
    return info if info is not None and ready in (None, info.ready) else None


async def command(redis: Redis, keys: Keys, message: AnyMessage) -> None:
    await streams.append(redis, keys.control("r1"), messages.kind(message), "test", messages.encode(message))


async def test_a_killed_inference_process_gives_its_requests_back_and_returns(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that hang because the process which had them is dead, or a replica that stays away."""
    settings = options(monkeypatch, broker, tmp_path)
    async with running(redis, settings) as supervisor:
        before = await _info(redis, settings)
        await send(redis, keys, request(sampling=LONG))
        await eventually(lambda: _said(redis, keys, Delta))
        child = supervisor._inference.child
        assert child is not None
        child.kill()
        await eventually(lambda: _said(redis, keys, Lost))
        await eventually(lambda: _info(redis, settings, ready=True), within_s=30)
        after = await _info(redis, settings)
        assert before is not None
        assert after is not None
        assert after.incarnation != before.incarnation
        await send(redis, keys, request("q2"))
        await eventually(lambda: _said(redis, keys, Done))
    assert await _info(redis, settings) is None


async def test_a_drain_finishes_the_running_answer(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop that gives an answer away in its middle, or leaves the entry of a replica that is gone."""
    settings = options(monkeypatch, broker, tmp_path)
    async with running(redis, settings) as supervisor:
        await send(redis, keys, request(sampling=LONG))
        await eventually(lambda: _said(redis, keys, Delta))
        supervisor.stop.set()
        await eventually(lambda: _info(redis, settings, ready=False))
        # The dispatcher has not seen it yet: what was read in time is answered, the rest is for others, and soon.
        number = 0
        while not await _said(redis, keys, Lost):
            number += 1
            await send(redis, keys, request(f"late{number}"))
            await eventually(partial(_is_said, redis, keys, f"late{number}"))
        assert not await _is_said(redis, keys, "q1")
    said = await replies(redis, keys)
    assert [reply.id for reply in said if isinstance(reply, Lost)] == [f"late{number}"]
    assert isinstance(said[-1], Done)
    assert (said[-1].id, said[-1].output_tokens) == ("q1", LONG.max_tokens)
    assert await redis.exists(keys.lease("r1")) == 0


async def test_a_replica_that_is_told_to_leave_drains_and_ends(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that nobody hears, or that costs the answers which are on their way."""
    settings = options(monkeypatch, broker, tmp_path)
    async with running(redis, settings):
        await send(redis, keys, request(sampling=LONG))
        await eventually(lambda: _said(redis, keys, Delta))
        await command(redis, keys, Leave(reason="by hand"))
        await eventually(lambda: _is_gone(redis, settings))
    assert isinstance((await replies(redis, keys))[-1], Done)


async def test_commands_reach_the_engine(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancel or a batch size that stays on its way; a foreign entry that stops the reader."""
    settings = options(monkeypatch, broker, tmp_path)
    async with running(redis, settings):
        await send(redis, keys, request(sampling=LONG))
        await eventually(lambda: _said(redis, keys, Delta))
        await redis.xadd(keys.control("r1"), streams.fields("cancel", "x", b"garbage"))
        await command(redis, keys, Configure(sizes=BatchSizes(0, 3)))
        await command(redis, keys, Cancel(id="q1"))
        await eventually(lambda: _is_empty(redis, keys))
        await eventually(lambda: _limit(redis, keys, 3))


async def test_a_replica_that_keeps_dying_ends_with_the_reason(
    redis: Redis, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that fails the same way again and again, for ever."""
    settings = options(monkeypatch, broker, tmp_path, RESTART_LIMIT="1", ENGINE="torch", MODEL=str(tmp_path / "none"))
    supervisor = Supervisor(settings, redis, SystemClock())
    with pytest.raises(ModelError, match="died 2 times"):
        await asyncio.wait_for(supervisor.run(), 60)


async def test_a_stuck_process_is_replaced(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is there but does nothing, with its requests in it."""
    settings = options(monkeypatch, broker, tmp_path, STALL_S="2")
    async with running(redis, settings) as supervisor:
        child = supervisor._inference.child
        assert child is not None
        assert child.process is not None
        await send(redis, keys, request(sampling=LONG))
        await eventually(lambda: _said(redis, keys, Delta))
        os.kill(child.process.pid, signal.SIGSTOP)
        await eventually(lambda: _said(redis, keys, Lost))
        await eventually(lambda: _info(redis, settings, ready=True), within_s=30)


async def test_health_fails_while_the_engine_is_stuck_or_away(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A health check that sees only the supervisor, which is well while nothing is answered."""
    settings = options(monkeypatch, broker, tmp_path, UNHEALTHY_S="1")
    async with running(redis, settings) as supervisor, aiohttp.ClientSession() as http:
        info, child = await _info(redis, settings), supervisor._inference.child
        assert info is not None
        assert child is not None

        async def health() -> tuple[int, str]:
            async with http.get(f"{info.data_url}/health") as response:
                return response.status, (await response.json()).get("reason", "")

        assert await health() == (200, "")
        child.kill(signal.SIGSTOP)
        await eventually(lambda: _is(health, 503, "no progress"))
        child.kill()
        await eventually(lambda: _is(health, 503, "not ready"))
        await eventually(lambda: _is(health, 200, ""), within_s=30)


async def test_a_lost_registry_entry_is_written_again(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that lost its last second, and replicas that nobody sees any more."""
    settings = options(monkeypatch, broker, tmp_path)
    async with running(redis, settings):
        await redis.flushall()
        await eventually(lambda: _info(redis, settings, ready=True))


async def test_a_damaged_registry_entry_is_written_anew(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that lives and that nobody sees until it is restarted; or reports that take its process down."""
    settings = options(monkeypatch, broker, tmp_path)
    async with running(redis, settings) as supervisor:
        await redis.hset(keys.replica("r1"), "state", "asleep")
        await eventually(lambda: _info(redis, settings, ready=True))
        await redis.set(keys.replica("r1"), "no hash")
        await eventually(lambda: _info(redis, settings, ready=True))
        await redis.delete(keys.replicas)
        await eventually(lambda: _info(redis, settings, ready=True))
        assert supervisor.presence.info is not None
        incarnation = await redis.hget(keys.replica("r1"), "incarnation")
        assert incarnation.decode() == supervisor.presence.info.incarnation


async def test_a_replica_that_cannot_serve_is_never_called_ready(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat that began before the death of the inference process, and undoes what was said about it since."""
    settings = options(monkeypatch, broker, tmp_path, RESTART_BACKOFF_S="2")
    async with running(redis, settings) as supervisor:
        child = supervisor._inference.child
        assert child is not None
        child.kill()
        await eventually(lambda: _info(redis, settings, ready=False))
        await redis.hset(keys.replica("r1"), "ready", 1)
        await eventually(lambda: _info(redis, settings, ready=False))
        assert supervisor._inference.child is child


async def test_nothing_is_left_of_a_replica_that_left(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heartbeat that overlaps with the end and leaves a replica behind which is nowhere."""
    async with running(redis, options(monkeypatch, broker, tmp_path, LEASE_TTL_S="0.004")):
        pass
    left = {key async for key in redis.scan_iter()}
    assert not left & {key.encode() for key in (keys.replicas, keys.replica("r1"), keys.lease("r1"))}


async def test_an_earlier_life_left_in_training_starts_as_serving(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that came back and counts as Combined though nothing trains in it, with its old requests lost."""
    stale = ReplicaInfo("r1", "m", "old", ReplicaState.COMBINED, ready=True, infer_batch_max=8, context_tokens=64)
    await Registry(redis, keys).register(stale, 30)
    await send(redis, keys, request())
    async with running(redis, options(monkeypatch, broker, tmp_path)) as supervisor:
        await eventually(lambda: _said(redis, keys, Lost))
        await eventually(lambda: _state(redis, supervisor.settings, ReplicaState.SERVING))


async def test_uploads_go_to_the_data_folder_and_bad_ones_are_refused_by_line(
    redis: Redis, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training data that is found to be malformed only when a job has started, or that is stored twice."""
    settings = options(monkeypatch, broker, tmp_path, MAX_UPLOAD_MB="1")
    good = '{"prompt": "a", "completion": "b"}\n{"instruction": "a", "output": "b"}\n'
    async with running(redis, settings) as supervisor, aiohttp.ClientSession() as http:
        info = await _info(redis, settings)
        assert info is not None
        for _ in range(2):
            async with http.post(f"{info.data_url}/data", data=good) as response:
                assert (response.status, await response.json()) == (200, {"samples": 2})
        async with http.post(f"{info.data_url}/data", data=good + '{"prompt": 7}\n') as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "prompt")
            assert "line 3" in error["message"]
        async with http.post(f"{info.data_url}/data", data=io.BytesIO(b"x" * (2 << 20))) as response:
            assert response.status == 413
        async with http.post(f"{info.data_url}/data", data=b"\xff\xfe") as response:
            assert "UTF-8" in (await response.json())["error"]["message"]
        async with http.get(f"{info.data_url}/health") as response:
            assert response.status == 200
        assert await supervisor.digest() == "fake"
        assert not info.trainable
    stored = list((tmp_path / "uploads").iterdir())
    assert [path.read_text() for path in stored] == [good]


async def _state(redis: Redis, settings: ReplicaSettings, state: ReplicaState) -> bool:
    info = await _info(redis, settings)
    return info is not None and info.incarnation != "old" and info.state is state


async def _is(health: Callable[[], Awaitable[tuple[int, str]]], status: int, reason: str) -> bool:
    found = await health()
    return found[0] == status and reason in found[1]


async def _said(redis: Redis, keys: Keys, kind: type) -> bool:
    return any(isinstance(reply, kind) for reply in await replies(redis, keys))


async def _is_gone(redis: Redis, settings: ReplicaSettings) -> bool:
    return await _info(redis, settings) is None


async def _is_said(redis: Redis, keys: Keys, id_: str) -> bool:
    """Whether the request has ended."""
    return any(reply.id == id_ and not isinstance(reply, Delta) for reply in await replies(redis, keys))


async def _is_empty(redis: Redis, keys: Keys) -> bool:
    return int(await redis.xlen(keys.subflow("r1"))) == 0


async def _limit(redis: Redis, keys: Keys, limit: int) -> bool:
    entries = streams.parse("", await redis.xrevrange(keys.telemetry, count=1))
    report = messages.decode(entries[0].data) if entries else None
    return isinstance(report, messages.InferenceReport) and report.limit == limit


async def test_a_task_for_a_process_that_is_not_there_fails_at_once(
    redis: Redis, keys: Keys, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that waits for the deadline of a command which nobody took."""
    settings = options(monkeypatch, broker, tmp_path)
    evaluate = Evaluate(job="j", round=1, adapter="desk", version=0, hyper=Hyperparams(), deadline_s=1e12)
    async with running(redis, settings):
        await command(redis, keys, evaluate)
        await eventually(lambda: _failed(redis, keys, "evaluate"))


async def _failed(redis: Redis, keys: Keys, task: str) -> bool:
    heard = [messages.decode(entry.data) for entry in streams.parse("", await redis.xrange(keys.events))]
    return any(isinstance(event, TaskFailed) and event.task == task for event in heard)
