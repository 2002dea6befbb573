"""A whole replica with a real tiny model: it serves and fine-tunes on one copy of the weights, as client and server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_common.messages import (
    Aggregate,
    Aggregated,
    Delta,
    Done,
    Evaluate,
    Evaluated,
    Hyperparams,
    InferenceReport,
    LoadAdapter,
    PauseTraining,
    ReplicaChanged,
    ResumeTraining,
    StopTraining,
    TaskFailed,
    TrainReport,
    TrainRound,
    UpdateUploaded,
)
from collm_common.registry import Registry
from collm_common.settings import load
from collm_common.types import BatchSizes, SamplingParams
from collm_replica.mps import PIPES
from collm_replica.settings import ReplicaSettings
from collm_replica.supervisor import Supervisor
from tests.replica.support import replies, request, send
from tests.support.broker import Broker
from tests.support.models import tiny_model_folder
from tests.support.scan import assert_not_in_redis
from tests.support.waiting import eventually

DEVICE = os.environ.get("COLLM_TEST_DEVICE", "cpu")
CANARY = "zebra-canary-7741"
HYPER = Hyperparams(
    rank=4, alpha=8.0, learning_rate=1e-2, warmup_steps=1, max_tokens=200, snapshot_steps=2, heldout_samples=4
)
M = TypeVar("M")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"), "llama")


@asynccontextmanager
async def replica(
    redis: Redis, broker: Broker, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Supervisor]:
    """One replica over the tiny model, with canary strings in its private data."""
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"prompt": f"{CANARY} {n}?", "completion": f"{CANARY} answer {n % 4}"} for n in range(24)]
    (data / "private.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setenv("COLLM_REDIS_URL", broker.url)
    values = {"ID": "r1", "MODEL": str(model), "SERVED_NAME": "m", "DATA_DIR": str(data), "RUN_DIR": str(tmp_path)}
    values |= {"CONTEXT_TOKENS": "256", "KV_MB": "16", "REPORT_S": "0.1", "RESTART_BACKOFF_S": "0.05", "SLOTS": "3"}
    values |= {"DEVICE": DEVICE}
    for name, value in values.items():
        monkeypatch.setenv(f"COLLM_REPLICA_{name}", value)
    supervisor = Supervisor(load(ReplicaSettings, "replica"), redis, SystemClock())
    task = asyncio.create_task(supervisor.run())
    try:
        await eventually(lambda: task.done() or _trainer_is_ready(supervisor), within_s=60)
        assert not task.done(), task.exception()
        yield supervisor
    finally:
        supervisor.stop.set()
        await asyncio.wait_for(task, 30)


def _trainer_is_ready(supervisor: Supervisor) -> bool:
    child = supervisor._training.child
    return child is not None and child.ready.done() and not child.ready.cancelled()


async def tell(redis: Redis, keys: Keys, message: messages.Control) -> None:
    await streams.append(redis, keys.control("r1"), messages.kind(message), "test", messages.encode(message))


async def heard(redis: Redis, key: str, type_: type[M]) -> list[M]:
    found = [messages.decode(entry.data) for entry in streams.parse(key, await redis.xrange(key))]
    return [message for message in found if isinstance(message, type_)]


async def hear(redis: Redis, key: str, type_: type[M], count: int = 1) -> list[M]:
    async def enough() -> bool:
        return len(await heard(redis, key, type_)) >= count

    await eventually(enough, within_s=60)
    return await heard(redis, key, type_)


def train(round_: int = 1, start: int = 0, steps: int = 6, deadline_s: float = 60.0) -> TrainRound:
    return TrainRound(
        job="j1",
        round=round_,
        adapter="desk",
        start=start,
        sizes=BatchSizes(4, 4),
        steps=steps,
        first_step=6 * (round_ - 1),
        total_steps=12,
        hyper=HYPER,
        deadline_s=time.time() + deadline_s,
    )


async def test_a_round_from_training_to_the_published_version(
    redis: Redis, keys: Keys, broker: Broker, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that does not end in a better adapter, changes the base weights, or leaves training text in Redis."""
    async with replica(redis, broker, model, tmp_path, monkeypatch) as supervisor:
        await redis.hset(keys.adapter("desk"), mapping={"version": 0, "model": "m"})
        await redis.sadd(keys.adapters, "desk")
        assert (await Registry(redis, keys).replicas())["r1"].trainable
        before = await supervisor.digest()
        await tell(redis, keys, Evaluate(job="j1", round=1, adapter="desk", version=0, hyper=HYPER, deadline_s=1e12))
        await tell(redis, keys, train())
        update = (await hear(redis, keys.events, UpdateUploaded))[0]
        assert (update.replica, update.samples) == ("r1", 24)
        assert update.loss_last < update.loss
        reports = await heard(redis, keys.telemetry, TrainReport)
        assert [report.step for report in reports] == list(range(1, 7))
        snapshots = partial(_reported, redis, keys, lambda report: report.snapshots >= 2)
        await eventually(snapshots)

        await tell(
            redis,
            keys,
            Aggregate(
                job="j1",
                round=1,
                adapter="desk",
                version=1,
                parent=0,
                clients=("r1",),
                steps=6,
                hyper=HYPER,
                deadline_s=1e12,
            ),
        )
        aggregated = (await hear(redis, keys.events, Aggregated))[0]
        assert aggregated.residual < 1e-3
        await tell(redis, keys, Evaluate(job="j1", round=1, adapter="desk", version=1, hyper=HYPER, deadline_s=1e12))
        base, candidate = await hear(redis, keys.events, Evaluated, count=2)
        assert (base.version, candidate.version) == (0, 1)
        assert candidate.quality.cross_entropy < base.quality.cross_entropy

        await redis.hset(keys.adapter("desk"), "version", 1)
        await tell(redis, keys, LoadAdapter(name="desk", version=1))
        await eventually(partial(_reported, redis, keys, lambda report: report.versions.get("desk") == "1"))
        await send(redis, keys, request(adapter="desk", reference=(66, 67)))
        await eventually(partial(_said, redis, keys, Done))
        assert {str(r.adapter) for r in await replies(redis, keys) if isinstance(r, Delta)} == {"desk@v1"}
        assert await supervisor.digest() == before
        await assert_not_in_redis(redis, CANARY.encode())
    assert list((tmp_path / "collm-r1-snapshots").iterdir()) == []


async def test_training_pauses_goes_on_and_stops_between_micro_steps(
    redis: Redis, keys: Keys, broker: Broker, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that cannot take its device back from a job."""
    async with replica(redis, broker, model, tmp_path, monkeypatch):
        await tell(redis, keys, train(steps=5000))
        await hear(redis, keys.telemetry, TrainReport, count=2)
        await tell(redis, keys, PauseTraining())
        await eventually(partial(_reported, redis, keys, lambda report: report.train_batch == 0))
        stood = len(await heard(redis, keys.telemetry, TrainReport))
        await send(redis, keys, request())
        await eventually(partial(_said, redis, keys, Done))
        assert len(await heard(redis, keys.telemetry, TrainReport)) <= stood + 1
        await tell(redis, keys, ResumeTraining())
        await hear(redis, keys.telemetry, TrainReport, count=stood + 3)
        await tell(redis, keys, StopTraining(job="j1"))
        await tell(redis, keys, train(round_=2, steps=1))
        update = (await hear(redis, keys.events, UpdateUploaded))[0]
        assert update.round == 2
        assert await heard(redis, keys.events, TaskFailed) == []


async def test_a_task_that_cannot_be_done_is_reported_with_its_reason(
    redis: Redis, keys: Keys, broker: Broker, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that waits for its deadline because a client failed in silence."""
    async with replica(redis, broker, model, tmp_path, monkeypatch):
        await tell(redis, keys, train(start=7))
        await tell(redis, keys, train(deadline_s=-1.0))
        await tell(
            redis,
            keys,
            Aggregate(
                job="j1",
                round=1,
                adapter="desk",
                version=1,
                parent=0,
                clients=("r9",),
                steps=6,
                hyper=HYPER,
                deadline_s=1e12,
            ),
        )
        failed = await hear(redis, keys.events, TaskFailed, count=3)
        reasons = [failure.reason for failure in failed]
        assert "no version 7" in reasons[0]
        assert "deadline" in reasons[1]
        assert "r9" in reasons[2]


async def test_a_killed_fine_tuning_process_costs_its_task_and_nothing_else(
    redis: Redis, keys: Keys, broker: Broker, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training that takes serving down with it, or that never comes back."""
    async with replica(redis, broker, model, tmp_path, monkeypatch) as supervisor:
        incarnation = (await Registry(redis, keys).replicas())["r1"].incarnation
        await tell(redis, keys, train(steps=5000))
        await hear(redis, keys.telemetry, TrainReport)
        await send(redis, keys, request(sampling=SamplingParams(max_tokens=200)))
        await eventually(partial(_said, redis, keys, Delta))
        child = supervisor._training.child
        assert child is not None
        assert child.process is not None
        os.kill(child.process.pid, signal.SIGKILL)
        failed = (await hear(redis, keys.events, TaskFailed))[0]
        assert (failed.task, failed.replica) == ("train_round", "r1")
        await eventually(partial(_said, redis, keys, Done))
        changes = [change.what for change in await heard(redis, keys.events, ReplicaChanged)]
        assert changes == ["up", "finetune_restarting"]
        await eventually(lambda: supervisor._training.child is not child and _trainer_is_ready(supervisor), 60)
        await tell(redis, keys, train(steps=1))
        await hear(redis, keys.events, UpdateUploaded)
        assert (await Registry(redis, keys).replicas())["r1"].incarnation == incarnation


async def test_another_sm_share_takes_another_process_and_loses_no_task(
    redis: Redis, keys: Keys, broker: Broker, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share that is chosen and never in force, or a respawn that counts as a death and fails the round."""
    monkeypatch.setenv("COLLM_REPLICA_SM_SHARES", "[0.3, 1.0]")
    monkeypatch.setenv(PIPES, str(tmp_path / "pipes"))
    async with replica(redis, broker, model, tmp_path, monkeypatch) as supervisor:
        first = supervisor._training.child
        for round_, share, renewed in ((1, 0.3, True), (2, 0.3, False)):
            task = train(round_, steps=2)
            await tell(redis, keys, msgspec.structs.replace(task, sizes=BatchSizes(4, 4, share)))
            await hear(redis, keys.events, UpdateUploaded, round_)
            assert (supervisor._training.child is not first) is renewed
            first = supervisor._training.child
        assert {report.sizes.sm_share for report in await heard(redis, keys.telemetry, TrainReport)} == {0.3}
        assert await heard(redis, keys.events, TaskFailed) == []
        assert [event for event in await heard(redis, keys.events, ReplicaChanged) if event.what != "up"] == []
        reports = await heard(redis, keys.telemetry, InferenceReport)
        assert (reports[-1].mps, reports[-1].sm_shares) == (True, (0.3, 1.0))


async def test_fine_tuning_that_is_given_up_leaves_serving_alone(
    redis: Redis, keys: Keys, broker: Broker, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that stops to answer because its training cannot run."""
    monkeypatch.setenv("COLLM_REPLICA_RESTART_LIMIT", "0")
    async with replica(redis, broker, model, tmp_path, monkeypatch) as supervisor:
        child = supervisor._training.child
        assert child is not None
        child.kill()
        await hear(redis, keys.events, ReplicaChanged, count=2)
        await eventually(partial(_cannot_train, redis, keys))
        await tell(redis, keys, train())
        assert (await hear(redis, keys.events, TaskFailed))[0].task == "train_round"
        await send(redis, keys, request())
        await eventually(partial(_said, redis, keys, Done))


async def test_a_restarted_inference_process_finds_the_weights_and_the_adapter(
    redis: Redis, keys: Keys, broker: Broker, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart that serves the base model because it forgot what was published, or loads the model again."""
    async with replica(redis, broker, model, tmp_path, monkeypatch) as supervisor:
        await tell(redis, keys, train(steps=1))
        await hear(redis, keys.events, UpdateUploaded)
        aggregate = Aggregate(
            job="j1",
            round=1,
            adapter="desk",
            version=1,
            parent=0,
            clients=("r1",),
            steps=6,
            hyper=HYPER,
            deadline_s=1e12,
        )
        await tell(redis, keys, aggregate)
        await hear(redis, keys.events, Aggregated)
        await redis.hset(keys.adapter("desk"), mapping={"version": 1, "model": "m"})
        await redis.sadd(keys.adapters, "desk")
        if DEVICE == "cpu":
            for path in model.glob("*.safetensors"):
                path.rename(path.with_suffix(".hidden"))
        child = supervisor._inference.child
        assert child is not None
        child.kill()
        await eventually(partial(_came_up, redis, keys, 2), within_s=60)
        await send(redis, keys, request(adapter="desk"))
        await eventually(partial(_said, redis, keys, Done), within_s=60)
        for path in model.glob("*.hidden"):
            path.rename(path.with_suffix(".safetensors"))
        assert {str(r.adapter) for r in await replies(redis, keys) if isinstance(r, Delta)} == {"desk@v1"}


async def _cannot_train(redis: Redis, keys: Keys) -> bool:
    return not (await Registry(redis, keys).replicas())["r1"].trainable


async def _reported(redis: Redis, keys: Keys, holds: Callable[[InferenceReport], bool]) -> bool:
    reports = await heard(redis, keys.telemetry, InferenceReport)
    return bool(reports) and holds(reports[-1])


async def _came_up(redis: Redis, keys: Keys, times: int) -> bool:
    changes = await heard(redis, keys.events, ReplicaChanged)
    return sum(change.what == "up" for change in changes) == times


async def _said(redis: Redis, keys: Keys, kind: type) -> bool:
    return any(isinstance(reply, kind) for reply in await replies(redis, keys))
