"""Whole federated jobs over a real broker, with launcher and coordinator beside replicas that answer at once."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from collm_common import latency, messages
from collm_common.clock import SystemClock
from collm_common.errors import FencedError
from collm_common.keys import Keys
from collm_common.lease import Lease
from collm_common.messages import (
    AdapterPublished,
    Aggregate,
    JobChanged,
    LoadAdapter,
    ReplicaChanged,
    StateChanged,
    StopTraining,
    TrainRound,
)
from collm_common.registry import Registry
from collm_common.streams import order
from collm_common.trouble import TROUBLES
from collm_common.types import ReplicaInfo, ReplicaState
from collm_coordinator.service import Coordinator
from collm_coordinator.settings import CoordinatorSettings
from collm_launcher.policy.idle import IdleRules
from collm_launcher.policy.job import Clean, Forget, Job, Phase, Publish, Rules
from collm_launcher.policy.rounds import start
from collm_launcher.service import Launcher
from collm_launcher.store import JobStore
from tests.launcher.support import ADAPTER, MODEL, RULES, SimReplica, events, replicas, running, settings
from tests.support.waiting import eventually

SERVING, IDLE, COMBINED = ReplicaState.SERVING, ReplicaState.IDLE, ReplicaState.COMBINED


def launcher(redis: Redis, **changes: object) -> Launcher:
    return Launcher(settings(**changes), redis, SystemClock())


def coordinator(redis: Redis) -> Coordinator:
    return Coordinator(CoordinatorSettings(), redis, SystemClock())


async def status(redis: Redis, keys: Keys) -> list[str]:
    return [event.status for event in await events(redis, keys) if isinstance(event, JobChanged)]


async def ended(redis: Redis, keys: Keys) -> bool:
    return bool({"done", "failed"} & {*(await status(redis, keys))})


async def all_in(redis: Redis, keys: Keys, state: ReplicaState) -> bool:
    return {info.state for info in (await Registry(redis, keys).replicas()).values() if info.alive} == {state}


async def unchosen(redis: Redis, keys: Keys) -> bool:
    told = [event for event in await events(redis, keys) if isinstance(event, StateChanged)]
    return any(event.before is IDLE and event.after is SERVING for event in told)


async def rounds_heard(members: list[SimReplica], count: int) -> bool:
    return all(len(member.told(TrainRound)) >= count for member in members)


async def test_idle_replicas_train_two_rounds_and_the_adapter_is_published(redis: Redis, keys: Keys) -> None:
    """A job that stalls between two services, publishes nothing, or leaves updates and roles behind."""
    async with replicas(redis, keys) as members, running(launcher(redis), coordinator(redis)):
        await eventually(lambda: ended(redis, keys))
        await eventually(lambda: all_in(redis, keys, SERVING))
        told = await events(redis, keys)
        assert (await status(redis, keys))[-1] == "done"
        published = [event for event in told if isinstance(event, AdapterPublished)]
        assert [(event.version, event.before, event.after) for event in published] == [(1, 4.0, 3.0), (2, 3.0, 2.5)]
        assert await redis.hget(keys.adapter(ADAPTER), "version") == b"2"
        assert await redis.smembers(keys.jobs) == set()
        assert not [key async for key in redis.scan_iter(f"{keys.job('*')}:r*")]
        await eventually(lambda: all(len(member.told(LoadAdapter)) == 2 for member in members))
        infos = (await Registry(redis, keys).replicas()).values()
        assert {info.job for info in infos} == {""}
        assert all(info.quality > 1 for info in infos)
    states = {(event.before, event.after) for event in told if isinstance(event, StateChanged)}
    assert states == {(SERVING, IDLE), (IDLE, COMBINED), (COMBINED, SERVING)}
    assert all(event.reason for event in told if isinstance(event, StateChanged | JobChanged))


async def test_a_job_that_a_client_wants_is_run_once_under_its_id(redis: Redis, keys: Keys) -> None:
    """A wanted job that waits for ever, runs again and again, or that its client cannot find."""
    await redis.hset(keys.wanted(MODEL), "asked", "ftjob-1")
    async with replicas(redis, keys), running(launcher(redis, adapters={}), coordinator(redis)):
        await eventually(lambda: _field(redis, keys.job("ftjob-1"), "status", b"done"))
        await eventually(lambda: all_in(redis, keys, SERVING))
        assert await redis.hgetall(keys.wanted(MODEL)) == {}
        assert await redis.hget(keys.adapter("asked"), "version") == b"2"
    told = [event for event in await events(redis, keys) if isinstance(event, JobChanged)]
    assert {event.job for event in told} == {"ftjob-1"}


async def test_a_cancelled_job_lets_its_clients_go(redis: Redis, keys: Keys) -> None:
    """A job that goes on although its client has given it up, or replicas that never serve again."""
    await redis.hset(keys.wanted(MODEL), "asked", "ftjob-1")
    async with replicas(redis, keys) as members, running(launcher(redis, adapters={}), coordinator(redis)):
        for member in members:
            member.going.clear()
        await eventually(lambda: rounds_heard(members, 1))
        await redis.hset(keys.job("ftjob-1"), "cancel", 1)
        await eventually(lambda: _field(redis, keys.job("ftjob-1"), "status", b"failed"))
        await eventually(lambda: all_in(redis, keys, SERVING))
        assert await redis.hgetall(keys.wanted(MODEL)) == {}


async def test_the_end_of_a_job_leaves_a_newer_one_of_the_adapter_wanted(redis: Redis, keys: Keys) -> None:
    """A job that its client waits for and that nobody will ever run."""
    lease = Lease(redis, keys, "launcher", "l1", 5)
    await lease.hold()
    await redis.hset(keys.wanted(MODEL), mapping={"asked": "ftjob-2", "other": "ftjob-1"})
    store = JobStore(redis, keys, lease, keep_versions=2)
    ended = job(id="ftjob-1", adapter="asked", wanted=True, phase=Phase.FAILED)
    await store.apply(ended, [], [], "0-0", 0.0)
    assert await redis.hgetall(keys.wanted(MODEL)) == {b"asked": b"ftjob-2", b"other": b"ftjob-1"}


async def _field(redis: Redis, key: str, name: str, wanted: bytes) -> bool:
    return bool(await redis.hget(key, name) == wanted)


async def test_a_round_begins_with_the_sizes_that_the_coordinator_drew(redis: Redis, keys: Keys) -> None:
    """Clients that train at a default because two services race."""
    async with replicas(redis, keys) as members, running(launcher(redis), coordinator(redis)):
        for member in members:
            member.going.clear()
        await eventually(lambda: rounds_heard(members, 1))
        for member in members:
            sizes = await latency.load_sizes(redis, keys, member.id)
            assert sizes is not None
            assert sizes.infer >= 4
            (command,) = member.told(TrainRound)
            assert isinstance(command, TrainRound)
            assert command.sizes == sizes


async def test_a_client_that_dies_in_a_round_costs_only_its_update(redis: Redis, keys: Keys) -> None:
    """A job that waits for a dead replica until its deadline."""
    async with replicas(redis, keys) as members, running(launcher(redis), coordinator(redis)):
        members[1].going.clear()
        await eventually(lambda: rounds_heard(members, 1))
        await members[1].die()
        await eventually(lambda: ended(redis, keys))
        assert (await status(redis, keys))[-1] == "done"
        (first, *_) = members[0].told(Aggregate) + members[2].told(Aggregate)
        assert isinstance(first, Aggregate)
        assert first.clients == ("r1", "r3")
    assert await redis.hget(keys.adapter(ADAPTER), "version") == b"2"


async def test_a_recalled_client_serves_and_the_others_go_on(redis: Redis, keys: Keys) -> None:
    """Requests that need a replica, or a round that is thrown away for one recall."""
    async with replicas(redis, keys) as members, running(launcher(redis), coordinator(redis)):
        for member in members:
            member.going.clear()
        await eventually(lambda: rounds_heard(members, 1))
        now = SystemClock().now()
        assert await Registry(redis, keys).transition("r1", COMBINED, SERVING, "needed", now)
        await eventually(lambda: members[0].told(StopTraining))
        for member in members[1:]:
            member.going.set()
        await eventually(lambda: ended(redis, keys))
    assert (await status(redis, keys))[-1] == "done"
    infos = await Registry(redis, keys).replicas()
    assert infos["r1"].job == ""


async def test_a_launcher_that_restarts_goes_on_with_the_round(redis: Redis, keys: Keys) -> None:
    """State that only one process had: a round begun twice, or never finished."""
    async with replicas(redis, keys) as members, running(coordinator(redis)):
        async with running(launcher(redis)):
            for member in members:
                member.going.clear()
            await eventually(lambda: rounds_heard(members, 1))
        assert await redis.scard(keys.jobs) == 1
        for member in members:
            member.going.set()
        await eventually(lambda: _uploads(redis, keys, 3))
        async with running(launcher(redis)):
            await eventually(lambda: ended(redis, keys))
        assert [len(member.told(TrainRound)) for member in members] == [2, 2, 2]
    assert (await status(redis, keys))[-1] == "done"
    assert await redis.hget(keys.adapter(ADAPTER), "version") == b"2"


async def _uploads(redis: Redis, keys: Keys, count: int) -> bool:
    return sum(messages.kind(event) == "update_uploaded" for event in await events(redis, keys)) >= count


async def test_of_two_launchers_one_leads_and_the_other_takes_over(redis: Redis, keys: Keys) -> None:
    """Two that both start jobs, or a standby that never wakes."""
    first, second = launcher(redis, lease_ttl_s=0.3), launcher(redis, lease_ttl_s=0.3)
    async with running(second):
        async with running(first):
            await eventually(lambda: first.leads or second.leads)
            assert not (first.leads and second.leads)
        await eventually(lambda: second.leads)
    assert not second.leads


async def test_a_replica_left_combined_without_a_job_serves_again(redis: Redis, keys: Keys) -> None:
    """Capacity lost for ever to a job that nobody remembers."""
    member = SimReplica(redis, keys, "r1")
    await member.register()
    now = SystemClock().now()
    await member.registry.transition("r1", SERVING, IDLE, "test", now)
    await member.registry.transition("r1", IDLE, COMBINED, "test", now)
    await member.registry.update("r1", job="gone")
    await redis.sadd(keys.jobs, "gone")
    async with running(launcher(redis)):
        await eventually(lambda: all_in(redis, keys, SERVING))
    assert (await member.registry.replicas())["r1"].job == ""
    assert await redis.smembers(keys.jobs) == set()


async def test_every_adapter_exists_from_the_start_as_the_base_model(redis: Redis, keys: Keys) -> None:
    """A name that clients cannot ask for until it has been trained."""
    one = launcher(redis)
    async with running(one):
        await eventually(lambda: one.leads)
    assert await redis.hgetall(keys.adapter(ADAPTER)) == {b"version": b"0", b"model": MODEL.encode()}
    assert await redis.smembers(keys.adapters) == {ADAPTER.encode()}


async def test_a_broken_entry_is_skipped(redis: Redis, keys: Keys) -> None:
    """One foreign entry in a shared stream that ends the launcher."""
    one = launcher(redis)
    async with replicas(redis, keys), running(one, coordinator(redis)):
        await eventually(lambda: one.leads)
        for key in (keys.events, keys.telemetry):
            await redis.xadd(key, {"kind": "noise", "id": "x", "data": b"garbage"})
        await eventually(lambda: ended(redis, keys))


async def test_damaged_sizes_do_not_end_the_launcher(redis: Redis, keys: Keys) -> None:
    """A value edited by hand that ends the launcher, and every one that takes over from it."""
    async with replicas(redis, keys), running(launcher(redis), coordinator(redis)):
        await redis.hset(keys.config("r1"), mapping={"train": "many", "infer": "1"})
        await eventually(lambda: ended(redis, keys))
    assert (await status(redis, keys))[-1] == "done"


async def test_a_replica_that_comes_up_is_told_what_is_current(redis: Redis, keys: Keys) -> None:
    """One that read the version before a publication and was known only after it: stale until the next."""
    await redis.hset(keys.adapter(ADAPTER), mapping={"model": MODEL, "version": 3})
    one = launcher(redis)
    async with replicas(redis, keys, ["r1"]) as (late,), running(one):
        await eventually(lambda: one.leads)
        for name in ("nobody", late.id):
            up = ReplicaChanged(replica=name, what="up", reason="test", time_s=0.0)
            await late.registry.announce(up, name)
        await eventually(lambda: late.told(LoadAdapter))
        assert late.told(LoadAdapter) == [LoadAdapter(name=ADAPTER, version=3)]
    assert not await redis.exists(keys.control("nobody"))


async def test_an_untrained_adapter_is_not_sent(redis: Redis, keys: Keys) -> None:
    """A replica told to load version 0, which is nowhere."""
    lease = Lease(redis, keys, "launcher", "one", 5)
    store = JobStore(redis, keys, lease, keep_versions=2)
    await store.adapter(ADAPTER, MODEL)
    await store.remind("r1", ADAPTER)
    assert not await redis.exists(keys.control("r1"))


async def test_a_damaged_adapter_hash_costs_no_stored_version(redis: Redis, keys: Keys) -> None:
    """A launcher that ends at a field it cannot read, or that gives a version's number to another one."""
    store = JobStore(redis, keys, Lease(redis, keys, "launcher", "one", 5), keep_versions=2)
    await redis.hset(keys.adapter(ADAPTER), mapping={"version": "junk", "last": b"\xff", "trained_s": "never"})
    await redis.hset(keys.adapter_version(ADAPTER, 1), "meta", b"x")
    assert await store.adapter(ADAPTER, MODEL) == (0, 2)
    assert await store.trained_s(ADAPTER) == 0.0


async def test_the_pause_after_a_job_outlives_its_launcher(redis: Redis, keys: Keys) -> None:
    """Jobs that follow each other without a pause because launchers change."""
    async with replicas(redis, keys), running(coordinator(redis)):
        async with running(launcher(redis)):
            await eventually(lambda: ended(redis, keys))
        registry = Registry(redis, keys)
        for id_ in await registry.replicas():
            await registry.transition(id_, SERVING, IDLE, "test", 0.0)
        async with running(launcher(redis, idle=IdleRules(window=2, return_ticks=2))):
            await eventually(lambda: unchosen(redis, keys))
    assert (await status(redis, keys)).count("forming") == 1


async def test_no_replica_falls_idle_while_no_job_can_come(redis: Redis, keys: Keys) -> None:
    """Replicas kept from their requests for nothing: between two jobs, or without data to learn from."""
    second = launcher(redis, idle=IdleRules(window=1, return_ticks=1))
    async with replicas(redis, keys):
        registry = Registry(redis, keys)
        for id_ in await registry.replicas():
            await registry.update(id_, trainable=False)
        async with running(second):
            await eventually(lambda: second.ticks >= 5)
    moves = [event for event in await events(redis, keys) if isinstance(event, StateChanged)]
    assert moves == []


async def test_two_adapters_of_one_model_are_trained_at_once_by_replicas_of_their_own(redis: Redis, keys: Keys) -> None:
    """A second adapter that waits for ever behind the first, or a replica that two jobs hold."""
    several = launcher(redis, adapters={MODEL: (ADAPTER, "phone")})
    async with replicas(redis, keys, [f"r{n}" for n in range(6)]) as members, running(coordinator(redis)):
        for member in members[3:]:
            await member.registry.update(member.id, trainable=False)
        for member in members:
            member.going.clear()
        async with running(several):
            await eventually(lambda: rounds_heard(members[:3], 1))
            for member in members[3:]:
                await member.registry.update(member.id, trainable=True)
            await eventually(lambda: rounds_heard(members[3:], 1))
            trained = [[_adapter_of(member) for member in team] for team in (members[:3], members[3:])]
            assert trained == [[ADAPTER] * 3, ["phone"] * 3]
            for member in members:
                member.going.set()
            await eventually(lambda: _versions(redis, keys, (ADAPTER, "phone"), b"2"))


def _adapter_of(member: SimReplica) -> str:
    (task,) = member.told(TrainRound)
    assert isinstance(task, TrainRound)
    return task.adapter


async def _versions(redis: Redis, keys: Keys, names: tuple[str, ...], version: bytes) -> bool:
    return all([await redis.hget(keys.adapter(name), "version") == version for name in names])


def job(**changes: object) -> Job:
    members = [
        ReplicaInfo(f"r{n}", MODEL, "i", IDLE, ready=True, infer_batch_max=8, context_tokens=64) for n in range(3)
    ]

    made, _ = start("j", 0.0, members, ADAPTER, 0, 1, RULES, 0)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


async def test_damaged_jobs_are_given_up_and_hide_no_other(redis: Redis, keys: Keys) -> None:
    """A launcher and a coordinator that stop for good because of a name that is no text, or a key of another type."""
    lease = Lease(redis, keys, "launcher", "l1", 5)
    await lease.hold()
    store = JobStore(redis, keys, lease, keep_versions=2)
    await store.apply(job(), [], [], "0-0", 0.0)
    await redis.sadd(keys.jobs, b"\xff", "string", "gone")
    await redis.set(keys.job("string"), "x")
    await redis.hset(keys.job("words"), mapping={"state": b"\xff", "position": b"\xff"})
    assert list((await store.jobs())[0]) == ["j"]
    assert await redis.smembers(keys.jobs) == {b"\xff", b"j"}
    await redis.sadd(keys.jobs, "string")
    service = coordinator(redis)
    async with running(service):
        told = TROUBLES.faults["WRONGTYPE"]
        await eventually(lambda: TROUBLES.faults["WRONGTYPE"] > told + 1 and service.leads)


async def test_a_stale_leader_changes_nothing(redis: Redis, keys: Keys) -> None:
    """A launcher that slept through its lease and then publishes over its successor."""
    old = Lease(redis, keys, "launcher", "old", 5)
    store = JobStore(redis, keys, old, keep_versions=2)
    with pytest.raises(FencedError):
        await store.apply(job(), [Publish(1, 2.0, 1.0)], ["r1"], "0-0", 0.0)
    await old.hold()
    await redis.delete(keys.lease("launcher"))
    await Lease(redis, keys, "launcher", "new", 5).hold()
    with pytest.raises(FencedError):
        await store.apply(job(), [Publish(1, 2.0, 1.0)], ["r1"], "0-0", 0.0)
    assert {key async for key in redis.scan_iter()} == {
        keys.lease("launcher").encode(),
        keys.fence("launcher").encode(),
    }


async def test_only_the_last_versions_and_no_rejected_ones_are_kept(redis: Redis, keys: Keys) -> None:
    """Memory that grows with every round, or a version that is deleted while it is served."""
    lease = Lease(redis, keys, "launcher", "one", 5)
    await lease.hold()
    store = JobStore(redis, keys, lease, keep_versions=2)
    for version in range(1, 7):
        await redis.hset(keys.adapter_version(ADAPTER, version), "meta", "x")
        await redis.hset(keys.server_state("j", version), "meta", "x")
    for parent, version in ((0, 1), (1, 3), (3, 4)):
        publish = Publish(version, 2.0, 1.0, parent)
        await store.apply(job(), [publish, Clean(1, ("r1",))], ["r1"], "0-0", 0.0)
    await store.apply(job(), [Forget(5)], ["r1"], "0-0", 0.0)
    assert await redis.exists(keys.server_state("j", 4)), "the next round goes on from it"
    assert not await redis.exists(keys.server_state("j", 3), keys.server_state("j", 5))
    left = [version for version in range(1, 7) if await redis.exists(keys.adapter_version(ADAPTER, version))]
    assert left == [2, 3, 4, 6]
    assert await store.adapter(ADAPTER, MODEL) == (4, 5)
    await redis.hset(keys.adapter(ADAPTER), "last", 5)
    assert await store.adapter(ADAPTER, MODEL) == (4, 7), "a number that is taken is never given again"


async def test_a_job_is_stored_readably_and_comes_back_as_it_was(redis: Redis, keys: Keys) -> None:
    """A state that a restarted launcher cannot read, or an operator cannot see."""
    lease = Lease(redis, keys, "launcher", "one", 5)
    await lease.hold()
    store = JobStore(redis, keys, lease, keep_versions=2)
    one = job(phase=Phase.TRAINING, round=2, rules=Rules(rounds=7))
    await store.apply(one, [], [], "12-3", 0.0)
    assert await store.jobs() == ({"j": one}, {"j": "12-3"})
    readable = await redis.hmget(keys.job("j"), ["status", "round", "server", "clients", "accumulation"])
    assert readable == [b"training", b"2", b"r0", b"r0,r1,r2", b"1"]
    one.phase = Phase.DONE
    await store.apply(one, [], [], "12-4", 0.0)
    assert await store.jobs() == ({}, {})
    assert await redis.ttl(keys.job("j")) > 0


def test_entry_ids_are_ordered_as_numbers() -> None:
    """9-0 after 10-0, as text has it."""
    assert sorted(["10-0", "9-0", "", "9-10", "9-9"], key=order) == ["", "9-0", "9-9", "9-10", "10-0"]


async def test_a_lease_taken_away_is_noticed_before_anything_is_written(redis: Redis, keys: Keys) -> None:
    """A leader that goes on writing after another has begun."""
    one = launcher(redis, lease_ttl_s=0.3)
    async with replicas(redis, keys), running(one):
        await eventually(lambda: redis.smembers(keys.jobs))
        await redis.set(keys.lease("launcher"), "other#99", px=400)
        await eventually(lambda: not one.leads)
        await eventually(lambda: one.leads)
        assert len(one.jobs) == 1
