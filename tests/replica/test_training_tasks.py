"""The queue of tasks in the fine-tuning process, with a real trainer on a tiny model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from redis.asyncio import Redis
from transformers import AutoModelForCausalLM

from collm_common import blobs, messages, streams
from collm_common.broker import stop_all
from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_common.messages import (
    Aggregate,
    Aggregated,
    Evaluate,
    Evaluated,
    Event,
    Hyperparams,
    TaskFailed,
    TrainRound,
    UpdateUploaded,
)
from collm_common.types import BatchSizes
from collm_replica import adapters, training_tasks
from collm_replica.adapter_feed import AdapterFeed
from collm_replica.channel import ToSupervisor
from collm_replica.finetune.privacy import epsilon
from collm_replica.finetune.trainer import Trainer
from collm_replica.training_tasks import MAX_MEASURED, TrainingTasks
from tests.replica.support import settings
from tests.support.models import byte_tokenizer, random_adapter, tiny_model_folder
from tests.support.waiting import eventually

HYPER = Hyperparams(rank=4, alpha=8.0, max_tokens=100, heldout_samples=2)


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)


@pytest.fixture
def tasks(redis: Redis, tmp_path: Path, model: Path) -> TrainingTasks:
    """Nothing runs yet; eight samples in the data folder."""
    rows = [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(model), byte_tokenizer())

    async def say(message: ToSupervisor) -> None:
        """There is no supervisor."""

    return TrainingTasks(settings(data_dir=str(tmp_path)), redis, trainer, "", SystemClock(), say)


def evaluation(job: str) -> Evaluate:
    return Evaluate(job=job, round=1, adapter="desk", version=0, hyper=HYPER, deadline_s=1e12)


def training(job: str) -> TrainRound:
    sizes = BatchSizes(1, 1)
    return TrainRound(
        job=job,
        round=1,
        adapter="desk",
        start=0,
        sizes=sizes,
        steps=1,
        first_step=0,
        total_steps=1,
        hyper=HYPER,
        deadline_s=1e12,
    )


def aggregation(clients: tuple[str, ...], **changes: Any) -> Aggregate:
    made = Aggregate(
        job="j", round=1, adapter="desk", version=1, parent=0, clients=clients, steps=6, hyper=HYPER, deadline_s=1e12
    )
    return msgspec.structs.replace(made, **changes)


async def events(redis: Redis, keys: Keys) -> list[Event]:
    rows = streams.parse("", await redis.xrange(keys.events))
    return [event for row in rows if isinstance(event := messages.decode(row.data), Event)]


async def test_a_job_that_is_left_takes_its_queued_tasks_along(redis: Redis, keys: Keys, tasks: TrainingTasks) -> None:
    """A replica that was recalled to serve and goes on to train a whole round for a job it left."""
    for task in (evaluation("left"), training("left"), evaluation("next")):
        tasks.add(task)
    tasks.leave("left")
    running = asyncio.create_task(tasks.run())
    await eventually(lambda: _count(redis, keys, 1))
    await stop_all(running)
    (only,) = await events(redis, keys)
    assert isinstance(only, Evaluated)
    assert only.job == "next"


async def test_whatever_fails_a_task_is_told_and_costs_nothing_else(
    redis: Redis, keys: Keys, tasks: TrainingTasks, tmp_path: Path
) -> None:
    """A fine-tuning process that dies of one damaged file or value, and the job that waits for its deadline."""
    good, bad = (tmp_path / "data.jsonl").read_text(), '{"prompt": "q", "completion": "a"}\n{"prompt": "\\ud800"}'
    (tmp_path / "data.jsonl").write_text(bad)
    running = asyncio.create_task(tasks.run())
    tasks.add(evaluation("malformed"))
    await eventually(lambda: _count(redis, keys, 1))
    (tmp_path / "data.jsonl").write_text(good)
    await redis.hset(keys.adapter_version("desk", 1), mapping={"meta": b"\xff", "bytes": 0, "sha256": "x"})
    tasks.add(Evaluate(job="damaged", round=1, adapter="desk", version=1, hyper=HYPER, deadline_s=1e12))
    tasks.add(evaluation("good"))
    await eventually(lambda: _count(redis, keys, 3))
    await stop_all(running)
    malformed, damaged, evaluated = await events(redis, keys)
    assert isinstance(malformed, TaskFailed)
    assert "line 2" in malformed.reason
    assert isinstance(damaged, TaskFailed)
    assert isinstance(evaluated, Evaluated)


async def test_a_slow_client_uploads_what_it_has(redis: Redis, keys: Keys, tasks: TrainingTasks) -> None:
    """A client whose whole round is thrown away because its last step came too late."""
    running = asyncio.create_task(tasks.run())
    tasks.add(msgspec.structs.replace(training("j"), steps=1_000_000, upload_by_s=0.0))
    await eventually(lambda: _count(redis, keys, 1))
    await stop_all(running)
    (done,) = await events(redis, keys)
    assert isinstance(done, UpdateUploaded)
    assert done.samples == 1
    updates, refused = await tasks._exchange.take(aggregation(("r1",)))
    assert (refused, [update.steps for update in updates]) == ({}, [1])


async def test_noised_uploads_are_counted_over_jobs(
    redis: Redis, keys: Keys, tasks: TrainingTasks, tmp_path: Path
) -> None:
    """An epsilon that begins anew with every job or restart, or an upload without the noise that it tells of."""
    noisy = msgspec.structs.replace(HYPER, clip_norm=1e-6, noise_multiplier=2.0)
    running = asyncio.create_task(tasks.run())
    for number, job in enumerate(("j", "k"), 1):
        tasks.add(msgspec.structs.replace(training(job), hyper=noisy))
        await eventually(lambda number=number: _count(redis, keys, number))  # type: ignore[misc]
    await stop_all(running)
    told = [event.epsilon for event in await events(redis, keys) if isinstance(event, UpdateUploaded)]
    assert told == [pytest.approx(epsilon(0.5, 1e-5)), pytest.approx(epsilon(0.5 * 2**0.5, 1e-5))]
    (update,), _ = await tasks._exchange.take(aggregation(("r1",)))
    start = tasks.trainer.fresh(HYPER, 0)
    learnt = {name: tensor for name, tensor in update.tensors.items() if ".lora_B." in name}
    changes = torch.cat([(tensor - start[name]).flatten() for name, tensor in learnt.items()])
    assert float(changes.std()) == pytest.approx(2e-6, rel=0.1)


async def upload(
    redis: Redis,
    keys: Keys,
    client: str,
    tensors: dict[str, torch.Tensor],
    base: str = "",
    samples: int = 8,
) -> None:
    """What a client that follows nobody's rules leaves in the broker."""
    data = adapters.encode(tensors)
    manifest = adapters.manifest(data, tensors, name="desk", version=1, base_digest=base, alpha=8.0)
    about = {"samples": samples, "steps": 1, "manifest": manifest}
    await blobs.put(redis, keys.update("j", 1, client), data, msgspec.msgpack.encode(about))


async def test_poisoned_updates_are_refused_by_name_and_the_others_make_a_version(
    redis: Redis, keys: Keys, tasks: TrainingTasks, model: Path
) -> None:
    """A round that one client can end, or an adapter that its poison is in."""
    good = [random_adapter(model, 4, 8.0, seed=n) for n in range(2)]
    await upload(redis, keys, "good1", good[0])
    await upload(redis, keys, "good2", good[1])
    await upload(redis, keys, "nan", {name: tensor * float("nan") for name, tensor in good[0].items()})
    await upload(redis, keys, "huge", {name: tensor * 1e4 for name, tensor in good[0].items()})
    await upload(redis, keys, "base", good[0], base="other")
    await upload(redis, keys, "rank", random_adapter(model, 8, 16.0))
    await upload(redis, keys, "shapes", {name: tensor[:, :3] for name, tensor in good[0].items()})
    await upload(redis, keys, "weight", good[0], samples=0)
    await upload(redis, keys, "damaged", good[0])
    await redis.hset(keys.update("j", 1, "damaged"), "chunk:0", b"x")
    await redis.hset(keys.update("j", 1, "garbage"), mapping={"meta": b"\xff", "bytes": 0, "sha256": "x"})
    bad = {
        "nan": "not finite",
        "huge": "norm",
        "base": "trained on base",
        "rank": "rank",
        "shapes": "ranks of A and B differ",
        "weight": "samples",
        "damaged": "damaged",
        "garbage": "damaged",
        "absent": "not there",
    }
    tasks.add(aggregation(("good1", *bad, "good2")))
    running = asyncio.create_task(tasks.run())
    await eventually(lambda: _count(redis, keys, 1))
    await stop_all(running)
    (done,) = await events(redis, keys)
    assert isinstance(done, Aggregated)
    assert set(done.refused) == set(bad)
    assert {client for client, why in bad.items() if why not in done.refused[client]} == set(), done.refused
    made = (await AdapterFeed(redis, keys, "", adapters.decode).fetch("desk", 1)).tensors
    for name, tensor in made.items():
        mean = (good[0][name].bfloat16().float() + good[1][name].bfloat16().float()) / 2
        assert torch.allclose(tensor, mean, atol=0.02), name


async def test_moments_of_the_server_follow_the_accepted_version(
    redis: Redis, keys: Keys, tasks: TrainingTasks, model: Path
) -> None:
    """Momentum lost with the server that had it, or taken from a candidate that was rejected."""
    await upload(redis, keys, "good1", random_adapter(model, 4, 8.0))
    running = asyncio.create_task(tasks.run())
    tasks.add(aggregation(("good1",), strategy="fedavgm"))
    await eventually(lambda: _count(redis, keys, 1))
    assert await redis.exists(keys.server_state("j", 1))
    tasks.add(aggregation(("good1",), strategy="fedavgm", parent=1, version=2))
    tasks.add(aggregation(("good1",), strategy="fedavg", parent=1, version=3))
    await eventually(lambda: _count(redis, keys, 3))
    await stop_all(running)
    feed = AdapterFeed(redis, keys, "", adapters.decode)
    first, second, plain = [(await feed.fetch("desk", version)).tensors for version in (1, 2, 3)]
    assert all(torch.equal(tensor, plain[name]) for name, tensor in first.items()), "the mean itself"
    assert any(not torch.allclose(tensor, first[name], atol=1e-2) for name, tensor in second.items())


async def _count(redis: Redis, keys: Keys, count: int) -> bool:
    return int(await redis.xlen(keys.events)) >= count


async def test_only_the_last_few_measured_versions_are_remembered(
    redis: Redis, keys: Keys, tasks: TrainingTasks
) -> None:
    """A fine-tuning process that grows with every version there ever was."""
    for number in range(MAX_MEASURED + 3):
        tasks.add(msgspec.structs.replace(evaluation("j"), adapter=f"desk{number}"))
    running = asyncio.create_task(tasks.run())
    await eventually(lambda: _count(redis, keys, MAX_MEASURED + 3))
    await stop_all(running)
    assert len(tasks._measured) == MAX_MEASURED


async def test_decoding_goes_first_but_training_never_starves(
    tasks: TrainingTasks, redis: Redis, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A micro-step right beside a stream that is late, or a round that a busy replica never ends."""
    monkeypatch.setattr(training_tasks, "MOST_YIELDED_S", 600.0)
    tasks.let_decoding_go_first(True)
    tasks.add(training("first"))
    running = asyncio.create_task(tasks.run())
    await eventually(lambda: tasks.busy and not tasks.trainer.done)
    assert tasks.progress == 0
    tasks.let_decoding_go_first(False)
    await eventually(lambda: tasks.trainer.done and not tasks.busy, within_s=30)
    monkeypatch.setattr(training_tasks, "MOST_YIELDED_S", 0.01)
    tasks.let_decoding_go_first(True)
    before = tasks.progress
    tasks.add(training("second"))
    await eventually(lambda: tasks.progress > before and tasks.trainer.done, within_s=30)
    await stop_all(running)
