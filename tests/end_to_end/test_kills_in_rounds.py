"""One job of real replicas, and in each of its rounds something else is killed in another phase."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from collm_common.broker import patiently
from collm_common.messages import AdapterPublished, AnyMessage, JobChanged, UpdateUploaded
from collm_common.registry import Registry
from collm_common.types import ReplicaState
from collm_replica.adapter_feed import AdapterFeed
from collm_replica.adapters import decode
from collm_tools.stack.service import Service
from collm_tools.stack.stack import Stack
from tests.end_to_end.test_whole_stack import PROMPTS, QUICK, answers, heard, process, whole_stack
from tests.support.broker import Broker
from tests.support.waiting import eventually

STRIKES = (
    (1, "training", "launcher"),
    (2, "upload", "coordinator"),
    (3, "aggregating", "server"),
    (4, "training", "client"),
    (5, "evaluating", "broker"),
)
RULES = json.loads(QUICK["COLLM_LAUNCHER_RULES"]) | {"rounds": 6, "steps": 12, "patience": 0, "max_rejected": 6}
ENV = QUICK | {"COLLM_LAUNCHER_RULES": json.dumps(RULES), "COLLM_LAUNCHER_LEASE_TTL_S": "1"}
ENV |= {"COLLM_COORDINATOR_LEASE_TTL_S": "1", "COLLM_COORDINATOR_FIT_S": "0.5"}


def reached(events: Sequence[AnyMessage], round_: int, phase: str) -> bool:
    if phase == "upload":
        return any(isinstance(event, UpdateUploaded) and event.round == round_ for event in events)
    changes = [event for event in events if isinstance(event, JobChanged) and event.round == round_]
    return any(event.status == phase for event in changes)


async def strike(stack: Stack, redis: Redis, broker: Broker, victim: str) -> None:
    """SIGKILL; the local stack starts the services again."""
    if victim in ("launcher", "coordinator"):
        kill(service(stack, victim))
        return
    if victim == "broker":
        broker.stop(signal.SIGKILL)
        broker.start()
        return
    (job,) = await redis.smembers(stack.keys.jobs)
    rows = await redis.hmget(stack.keys.job(job.decode()), "server", "clients")
    server, clients = (row.decode() for row in rows)
    if victim == "server":
        process(stack, server, "collm_replica.training").send_signal(signal.SIGKILL)
    else:
        kill(service(stack, f"replica-{next(id_ for id_ in clients.split(',') if id_ != server)}"))


def service(stack: Stack, name: str) -> Service:
    (found,) = [service for service in stack.services if service.spec.name == name]
    return found


def kill(victim: Service) -> None:
    assert victim.process is not None
    victim.process.kill()


@pytest.mark.timeout(240)
async def test_a_job_outlives_whatever_is_killed_in_its_rounds(tmp_path: Path) -> None:
    """A job that hangs, a replica that is never given back, or a version that is published and cannot be loaded."""
    broker = Broker()
    async with whole_stack(tmp_path, ENV, broker) as (stack, redis):
        for round_, phase, victim in STRIKES:
            await eventually(partial(_reached, redis, stack, round_, phase), within_s=60)
            await strike(stack, redis, broker, victim)
        await eventually(partial(_ended, redis, stack), within_s=90)
        await eventually(partial(_all_serve, redis, stack), within_s=60)

        told = await heard(redis, stack)
        assert [event.status for event in told if isinstance(event, JobChanged)][-1] == "done"
        published = [event.version for event in told if isinstance(event, AdapterPublished)]
        assert published == sorted(set(published))
        current = int(await redis.hget(stack.keys.adapter("desk"), "version") or 0)
        assert current == published[-1]
        feed = AdapterFeed(redis, stack.keys, "", decode)
        prefix = f"{stack.keys.adapter('desk')}:v"
        async for key in redis.scan_iter(f"{prefix}*"):
            if await redis.ttl(key) < 0:
                version = int(key.decode().removeprefix(prefix))
                assert version in published
                assert (await feed.fetch("desk", version)).tensors
        left = [key async for key in redis.scan_iter(f"{stack.keys.job('*')}:r*") if await redis.ttl(key) < 0]
        assert left == [], "an update that nobody removes"
        records = await answers(stack, PROMPTS, model="desk")
        assert [(record.outcome, record.adapter) for record in records] == [("completed", f"desk@v{current}")] * 6


async def _reached(redis: Redis, stack: Stack, round_: int, phase: str) -> bool:
    return reached(await patiently(partial(heard, redis, stack), 30), round_, phase)


async def _ended(redis: Redis, stack: Stack) -> bool:
    told = await patiently(partial(heard, redis, stack), 30)
    return any(isinstance(event, JobChanged) and event.status in ("done", "failed") for event in told)


async def _all_serve(redis: Redis, stack: Stack) -> bool:
    infos = (await Registry(redis, stack.keys).replicas()).values()
    free = [info for info in infos if info.alive and info.ready and info.state is ReplicaState.SERVING and not info.job]
    return len(free) == 3
