"""The way back to an older version, between jobs and under a running one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import Redis

from collm_common import blobs
from collm_common.clock import SystemClock
from collm_common.errors import AdapterError
from collm_common.keys import Keys
from collm_common.lease import Lease
from collm_common.lineage import Turn, history, roll_back
from collm_common.messages import AdapterRolledBack, JobChanged, LoadAdapter, StopTraining
from collm_coordinator.service import Coordinator
from collm_coordinator.settings import CoordinatorSettings
from collm_launcher.policy.job import Job, Phase, Publish, Send
from collm_launcher.policy.rounds import on_event, start
from collm_launcher.service import Launcher
from collm_launcher.store import JobStore
from tests.launcher.support import ADAPTER, MODEL, RULES, events, replicas, running, settings
from tests.launcher.test_rounds import info
from tests.support.waiting import eventually


def job() -> Job:
    made, _ = start("j", 0.0, [info(f"r{n}") for n in range(3)], ADAPTER, 0, 1, RULES, 0)
    return made


@pytest.fixture
async def store(redis: Redis, keys: Keys) -> JobStore:
    """Versions 1 and 2 were published one after the other."""
    lease = Lease(redis, keys, "launcher", "one", 5)
    await lease.hold()
    made = JobStore(redis, keys, lease, keep_versions=3)
    await made.adapter(ADAPTER, MODEL)
    for version in (1, 2):
        await blobs.put(redis, keys.adapter_version(ADAPTER, version), b"weights", b"meta", ttl_s=60)
        await made.apply(job(), [Publish(version, 3.0, 2.0, version - 1)], ["r1"], "0-0", float(version))
    return made


async def back(redis: Redis, keys: Keys, to: int | None = None) -> Turn:
    return await roll_back(redis, keys, ADAPTER, to, "worse answers", 9.0)


async def test_the_version_before_is_current_again_and_every_replica_is_told(
    redis: Redis, keys: Keys, store: JobStore
) -> None:
    """A rollback that a restarted replica, or the history, knows nothing of."""
    async with replicas(redis, keys) as members:
        assert await back(redis, keys) == Turn(1, 2, 9.0, reason="worse answers")
        assert await redis.hmget(keys.adapter(ADAPTER), ["version", "published"]) == [b"1", b"2,1"]
        told = LoadAdapter(name=ADAPTER, version=1)
        await eventually(lambda: all(told in member.told(LoadAdapter) for member in members))
        assert await back(redis, keys) == Turn(0, 1, 9.0, reason="worse answers")
        assert await back(redis, keys, 2) == Turn(2, 0, 9.0, reason="worse answers")
    turns = await history(redis, keys, ADAPTER)
    assert [(turn.version, turn.parent) for turn in turns] == [(1, 0), (2, 1), (1, 2), (0, 1), (2, 0)]
    assert (turns[1].job, turns[1].before, turns[1].after, turns[1].time_s) == ("j", 3.0, 2.0, 2.0)
    rolled = [event for event in await events(redis, keys) if isinstance(event, AdapterRolledBack)]
    assert [(event.before, event.version) for event in rolled] == [(2, 1), (1, 0), (0, 2)]


@pytest.mark.parametrize(
    ("name", "to", "why"),
    [("nobody", None, "no adapter"), (ADAPTER, 2, "current already"), (ADAPTER, 7, "not stored: choose among 0, 1$")],
)
async def test_what_cannot_be_rolled_back_to_is_refused_with_the_choice(
    redis: Redis, keys: Keys, store: JobStore, name: str, to: int | None, why: str
) -> None:
    """Replicas that are told to load what is nowhere."""
    with pytest.raises(AdapterError, match=why):
        await roll_back(redis, keys, name, to, "", 0.0)
    await redis.hdel(keys.adapter_version(ADAPTER, 1), "meta")
    with pytest.raises(AdapterError, match=r"version 1 .* is not stored"):
        await back(redis, keys, 1)
    assert await redis.hget(keys.adapter(ADAPTER), "version") == b"2"


async def test_only_a_published_version_stays(redis: Redis, keys: Keys, store: JobStore) -> None:
    """Candidates of servers that died, kept for ever; or a served version that expires."""
    assert await redis.ttl(keys.adapter_version(ADAPTER, 2)) == -1
    await blobs.put(redis, keys.adapter_version(ADAPTER, 3), b"weights", b"meta", ttl_s=60)
    assert 0 < await redis.ttl(keys.adapter_version(ADAPTER, 3)) <= 60


async def test_a_round_made_of_a_version_that_was_taken_back_is_not_published(
    redis: Redis, keys: Keys, store: JobStore
) -> None:
    """A bad version that comes back as its child, because the rollback was a moment too early for the launcher."""
    await blobs.put(redis, keys.adapter_version(ADAPTER, 3), b"weights", b"meta", ttl_s=60)
    await back(redis, keys)
    await store.apply(job(), [Publish(3, 2.0, 1.0, 2)], ["r1"], "0-0", 10.0)
    assert await redis.hget(keys.adapter(ADAPTER), "version") == b"1"
    assert not await redis.exists(keys.adapter_version(ADAPTER, 3))


async def at_once(rounds: int, step: Callable[[int], Awaitable[object]]) -> list[object]:
    return await asyncio.gather(*(step(n) for n in range(rounds)), return_exceptions=True)


async def test_of_many_that_roll_back_at_once_one_does(redis: Redis, keys: Keys, store: JobStore) -> None:
    """Two operators who go back two versions together when each wanted one."""
    done = await at_once(4, lambda _: back(redis, keys, 1))
    assert sum(isinstance(turn, Turn) for turn in done) == 1
    assert sum(isinstance(error, AdapterError) for error in done) == 3


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.AGGREGATING, Phase.EVALUATING])
def test_a_running_job_ends_and_its_clients_load_what_was_chosen(phase: Phase) -> None:
    """A job that goes on from a version that was taken back, or snapshots of it that stay on its clients."""
    one = job()
    one.phase, one.round, one.version, one.candidate = phase, 1, 2, 3
    event = AdapterRolledBack(name=ADAPTER, version=1, before=2, reason="worse", time_s=0.0)
    actions = on_event(one, 0.0, event)
    sent = [(action.replica, action.command) for action in actions if isinstance(action, Send)]
    for id_ in one.clients:
        mine = [command for replica, command in sent if replica == id_]
        assert mine == [StopTraining(job="j"), LoadAdapter(name=ADAPTER, version=1)]
    assert one.phase is Phase.DONE
    foreign = AdapterRolledBack(name="other", version=1, before=2, reason="worse", time_s=0.0)
    assert on_event(job(), 0.0, foreign) == []


async def test_a_rollback_during_a_round_ends_the_job_and_stays(redis: Redis, keys: Keys) -> None:
    """The end of a round that overwrites what the operator decided in the middle of it."""
    launcher, coordinator = (
        Launcher(settings(), redis, SystemClock()),
        Coordinator(CoordinatorSettings(), redis, SystemClock()),
    )
    async with replicas(redis, keys) as members, running(launcher, coordinator):
        await eventually(lambda: redis.hget(keys.adapter(ADAPTER), "published"))
        for member in members:
            member.going.clear()
        current = int(await redis.hget(keys.adapter(ADAPTER), "version"))
        await back(redis, keys, 0)
        await eventually(lambda: _ended(redis, keys))
    assert current in (1, 2)
    assert await redis.hget(keys.adapter(ADAPTER), "version") == b"0"


async def _ended(redis: Redis, keys: Keys) -> bool:
    heard = [event for event in await events(redis, keys) if isinstance(event, JobChanged)]
    return heard[-1].status == "done"
