"""All services as processes, real models, HTTP from outside: what an operator would see."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import aiohttp
import psutil
import pytest
from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.broker import connection
from collm_common.messages import AdapterPublished, InferenceReport, JobChanged, StateChanged
from collm_common.registry import Registry
from collm_common.types import ReplicaState, Slo
from collm_tools.demo.play import fresh_digests
from collm_tools.load.client import RequestRecord, Target, ask
from collm_tools.load.prompts import Prompt
from collm_tools.stack.options import StackOptions, service_specs
from collm_tools.stack.service import Spec
from collm_tools.stack.stack import Stack
from tests.support.broker import Broker
from tests.support.models import tiny_model_folder
from tests.support.scan import assert_not_in_redis
from tests.support.users import denied
from tests.support.waiting import eventually

CANARY = "pelican-canary-9182"
TOKENS = 120
PROMPTS = [
    Prompt((("user", f"tell me about the {word}"),)) for word in ("tide", "wheel", "lamp", "chain", "pier", "gull")
]
SLOW = {"COLLM_LAUNCHER_ADAPTERS": "{}"}
QUICK = {
    "COLLM_LAUNCHER_ADAPTERS": json.dumps({"tiny": "desk"}),
    "COLLM_LAUNCHER_TICK_S": "0.2",
    "COLLM_LAUNCHER_IDLE": json.dumps({"window": 3}),
    "COLLM_LAUNCHER_COOLDOWN_S": "600",
    "COLLM_LAUNCHER_RULES": json.dumps(
        {
            "rounds": 2,
            "steps": 6,
            "strategy": "product",
            "hyper": {
                "rank": 4,
                "alpha": 8.0,
                "learning_rate": 0.01,
                "max_tokens": 200,
                "snapshot_steps": 2,
                "heldout_samples": 4,
            },
        }
    ),
}


@asynccontextmanager
async def whole_stack(
    tmp_path: Path, env: dict[str, str], broker: Broker | None = None
) -> AsyncIterator[tuple[Stack, Redis]]:
    """Dispatcher, three replicas with private data, launcher, coordinator, each with its own rights at the broker.

    At the end, nobody has asked the broker for what it may not have.
    """
    model = tiny_model_folder(tmp_path / "model", "llama", num_hidden_layers=4)
    folders = []
    for number in range(3):
        folder = tmp_path / f"data{number}"
        folder.mkdir()
        rows = [{"prompt": f"{CANARY} desk {number} item {n}?", "completion": f"{CANARY} {n % 3}"} for n in range(24)]
        (folder / "private.jsonl").write_text("\n".join(map(json.dumps, rows)))
        folders.append(folder)
    small = {"COLLM_REPLICA_CONTEXT_TOKENS": "512", "COLLM_REPLICA_KV_MB": "32", "COLLM_REPLICA_REPORT_S": "0.2"}
    small |= {
        "COLLM_REPLICA_RUN_DIR": str(tmp_path),
        "COLLM_REPLICA_DEVICE": os.environ.get("COLLM_TEST_DEVICE", "cpu"),
    }
    broker = broker or Broker()
    options = StackOptions(
        str(model), "tiny", tmp_path / "run", data_dirs=folders, port=0, redis_url=broker.url, env={**small, **env}
    )

    def specs(url: str) -> list[Spec]:
        return [_as_its_user(spec, url) for spec in service_specs(options, model, url, stack.port)]

    broker.start()
    stack = Stack(options, specs=specs)
    try:
        async with connection(broker.url) as redis, stack:
            await stack.guard(stack.wait_ready())
            yield stack, redis
            assert await denied(redis) == []
    finally:
        broker.close()


def _as_its_user(spec: Spec, url: str) -> Spec:
    user = spec.name.partition("-")[0]
    own = url.replace("redis://", f"redis://{user}:{user}@")
    return replace(spec, env={**spec.env, "COLLM_REDIS_URL": own})


async def answers(stack: Stack, prompts: Sequence[Prompt], model: str = "tiny") -> list[RequestRecord]:
    """Ask all at once, greedily, for answers of a fixed length."""
    target = Target(stack.url, model, Slo("default"), timeout_s=90.0, ignore_eos=True)
    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(ask(session, target, prompt, TOKENS, 0.0) for prompt in prompts))


def process(stack: Stack, replica: str, module: str) -> psutil.Process:
    """One running process of a replica."""
    (service,) = [service for service in stack.services if service.spec.name == f"replica-{replica}"]
    assert service.process is not None
    children = psutil.Process(service.process.pid).children()
    (found,) = [child for child in children if module in child.cmdline()]
    return found


async def ready(redis: Redis, stack: Stack, count: int) -> bool:
    infos = (await Registry(redis, stack.keys).replicas()).values()
    return sum(info.ready and info.alive for info in infos) == count


@pytest.mark.timeout(240)
async def test_killed_processes_cost_a_pause_and_nothing_else(tmp_path: Path) -> None:
    """A request lost, answered twice or with repeated text because a process died under it."""
    async with whole_stack(tmp_path, SLOW) as (stack, redis):
        expected = [record.text for record in await answers(stack, PROMPTS)]
        assert all(expected)
        for module in ("collm_replica.inference", "collm_replica.training", "collm_replica.inference"):
            load = asyncio.create_task(answers(stack, PROMPTS * 4))
            await eventually(partial(_busy, redis, stack))
            for replica in await _busy(redis, stack):
                process(stack, replica, module).send_signal(signal.SIGKILL)
            records = await load
            assert [(record.outcome, record.error) for record in records] == [("completed", "")] * len(records)
            assert [record.text for record in records] == expected * 4
            assert max(record.e2e_s or 0.0 for record in records) < 30
            await eventually(partial(ready, redis, stack, 3), within_s=60)


@pytest.mark.timeout(240)
async def test_idle_replicas_learn_together_and_serve_what_they_learnt(tmp_path: Path) -> None:
    """A loop that is broken anywhere between falling idle and serving the new version, or that leaks training text."""
    async with whole_stack(tmp_path, QUICK) as (stack, redis):
        digests = await fresh_digests(redis, stack.keys)
        await eventually(partial(_has, redis, stack, JobChanged), within_s=60)
        during = await answers(stack, PROMPTS, model="desk")
        await eventually(partial(_job_ended, redis, stack), within_s=120)
        assert {record.outcome for record in during} == {"completed"}

        told = await heard(redis, stack)
        published = [event for event in told if isinstance(event, AdapterPublished)]
        assert published
        assert all(event.after <= event.before for event in published if event.after and event.before)
        moves = {(event.before, event.after) for event in told if isinstance(event, StateChanged)}
        assert {
            (ReplicaState.SERVING, ReplicaState.IDLE),
            (ReplicaState.IDLE, ReplicaState.COMBINED),
            (ReplicaState.COMBINED, ReplicaState.SERVING),
        } <= moves
        version = f"desk@v{published[-1].version}"
        await eventually(partial(_all_serve, redis, stack, str(published[-1].version)), within_s=30)
        after = await answers(stack, PROMPTS, model="desk")
        assert {record.adapter for record in after} == {version}
        base = await answers(stack, PROMPTS[:2])
        assert {(record.outcome, record.adapter) for record in base} == {("completed", "")}

        assert await fresh_digests(redis, stack.keys) == digests
        await assert_not_in_redis(redis, CANARY.encode())


async def heard(redis: Redis, stack: Stack) -> list[messages.AnyMessage]:
    """Every event so far."""
    rows = await redis.xrange(stack.keys.events)
    return [messages.decode(entry.data) for entry in streams.parse("", rows)]


async def _has(redis: Redis, stack: Stack, kind: type) -> bool:
    return any(isinstance(event, kind) for event in await heard(redis, stack))


async def _job_ended(redis: Redis, stack: Stack) -> bool:
    told = await heard(redis, stack)
    return any(isinstance(event, JobChanged) and event.status in ("done", "failed") for event in told)


async def _reports(redis: Redis, stack: Stack) -> dict[str, InferenceReport]:
    rows = await redis.xrevrange(stack.keys.telemetry, count=100)
    found = [messages.decode(entry.data) for entry in streams.parse("", rows)]
    return {report.replica: report for report in reversed(found) if isinstance(report, InferenceReport)}


async def _busy(redis: Redis, stack: Stack) -> list[str]:
    return [id_ for id_, report in (await _reports(redis, stack)).items() if report.running]


async def _all_serve(redis: Redis, stack: Stack, version: str) -> bool:
    reports = await _reports(redis, stack)
    return len(reports) == 3 and all(report.versions.get("desk") == version for report in reports.values())
