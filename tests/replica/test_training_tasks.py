"""The queue of tasks in the fine-tuning process, with a real trainer on a tiny model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from redis.asyncio import Redis
from transformers import AutoModelForCausalLM

from collm_common import messages, streams
from collm_common.broker import stop_all
from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_common.messages import Evaluate, Evaluated, Event, Hyperparams, TaskFailed, TrainRound
from collm_common.types import BatchSizes
from collm_replica.channel import ToSupervisor
from collm_replica.finetune.trainer import Trainer
from collm_replica.training_tasks import TrainingTasks
from tests.replica.support import settings
from tests.support.models import byte_tokenizer, tiny_model_folder
from tests.support.waiting import eventually

HYPER = Hyperparams(rank=4, alpha=8.0, max_tokens=100, heldout_samples=2)


@pytest.fixture
def tasks(redis: Redis, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainingTasks:
    """Nothing runs yet; eight samples in the data folder."""
    rows = [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(8)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    folder = tiny_model_folder(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(folder), byte_tokenizer())

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


async def _count(redis: Redis, keys: Keys, count: int) -> bool:
    return int(await redis.xlen(keys.events)) >= count
