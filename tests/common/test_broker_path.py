"""Streams, leases, transitions, blobs and give-up against a real server."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import uvloop
from redis.asyncio import Redis

from collm_common import blobs, messages, streams
from collm_common.broker import AWAY, connection, patiently
from collm_common.clock import ManualClock, ticks
from collm_common.errors import AdapterError, BrokerError
from collm_common.keys import Keys
from collm_common.lease import Lease
from collm_common.messages import Lost, Replies, Request
from collm_common.registry import Registry
from collm_common.requeue import GROUP, give_up_subflow
from collm_common.streams import AckPolicy, Entry, Tail, WorkQueue
from collm_common.types import ReplicaInfo, ReplicaState, SamplingParams, Slo
from tests.support.broker import Broker

STREAM = "{collm}:work"


def queue(redis: Redis, policy: AckPolicy = AckPolicy.ON_SUCCESS, consumer: str = "c1") -> WorkQueue:
    return WorkQueue(redis, STREAM, "g", consumer, policy)


def replica(id_: str = "r1", state: ReplicaState = ReplicaState.SERVING) -> ReplicaInfo:
    return ReplicaInfo(id_, "m", "i1", state, ready=True, infer_batch_max=8, context_tokens=64)


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (AckPolicy.ON_RECEIPT, ["handled with 0 left", "0 left"]),
        (AckPolicy.ON_SUCCESS, ["handled with 1 left", "0 left"]),
        (AckPolicy.BY_HANDLER, ["handled with 1 left", "1 left"]),
    ],
)
async def test_an_entry_is_acknowledged_when_its_policy_says(redis: Redis, policy: AckPolicy, order: list[str]) -> None:
    """An entry lost because it was acknowledged before its handler had done its work."""
    seen: list[str] = []
    work = queue(redis, policy)

    async def handler(entry: Entry) -> None:
        assert (entry.kind, entry.id, entry.data) == ("k", "a", b"x")
        seen.append(f"handled with {await redis.xlen(STREAM)} left")

    await streams.append(redis, STREAM, "k", "a", b"x")
    await work.create()
    assert await work.handle(handler, count=10) == 1
    assert [*seen, f"{await redis.xlen(STREAM)} left"] == order


async def test_a_failed_handler_leaves_its_entry_to_be_found_again(redis: Redis) -> None:
    """At-least-once delivery that loses the entry its consumer died on."""

    async def handler(entry: Entry) -> None:
        raise RuntimeError(entry.id)

    await streams.append(redis, STREAM, "k", "a", b"x")
    work = queue(redis)
    await work.create()
    with pytest.raises(RuntimeError, match="a"):
        await work.handle(handler, count=1)
    assert [entry.id for entry in await work.unfinished(10)] == ["a"]
    survivor = queue(redis, consumer="c2")
    assert [entry.id for entry in await survivor.claim("c1", 10)] == ["a"]
    await survivor.ack((await survivor.unfinished(10))[0].entry_id)
    assert await redis.xlen(STREAM) == 0
    assert (await redis.xpending(STREAM, "g"))["pending"] == 0


async def test_what_is_no_entry_is_removed_and_stops_nobody(redis: Redis) -> None:
    """Garbage that keeps a place for ever, or a kind that is no text and takes its reader down."""
    work = queue(redis)
    await work.create()
    await redis.xadd(STREAM, {"kind": "k"})
    await redis.xadd(STREAM, streams.fields("k", "a", b"x") | {"kind": b"\xff"})
    tail = Tail(redis, STREAM)
    await tail.start("0")
    assert [entry.id for entry in await tail.read(10)] == ["a"]
    assert [entry.id for entry in await work.read(10)] == ["a"]
    assert await redis.xlen(STREAM) == 1
    await redis.xdel(STREAM, (await work.unfinished(1))[0].entry_id)
    assert await work.unfinished(10) == []
    assert (await redis.xpending(STREAM, "g"))["pending"] == 0


async def test_a_group_that_is_gone_is_made_again_from_the_start(redis: Redis) -> None:
    """A consumer that loops on NOGROUP for ever after the broker lost its last second, or misses the backlog."""
    work = queue(redis)
    await work.create()
    await redis.delete(STREAM)
    await streams.append(redis, STREAM, "k", "a", b"x")
    assert await work.read(10, block_s=0) == []
    assert [entry.id for entry in await work.read(10, block_s=0)] == ["a"]


async def test_a_ghost_of_a_deleted_entry_is_dropped(redis: Redis) -> None:
    """A claim of an entry without a body that crashes the consumer."""
    work = queue(redis)
    await work.create()
    entry_id = await streams.append(redis, STREAM, "k", "a", b"x")
    await work.read(10)
    await redis.xdel(STREAM, entry_id)
    assert await work.unfinished(10) == []
    assert await queue(redis, consumer="c2").claim("c1", 10) == []


async def test_a_tail_sees_what_came_after_it_started_and_nothing_twice(redis: Redis) -> None:
    """Commands from before a restart that are carried out again."""
    await streams.append(redis, STREAM, "k", "old", b"x")
    tail = Tail(redis, STREAM)
    await tail.start()
    await streams.append(redis, STREAM, "k", "new", b"x")
    assert [entry.id for entry in await tail.read(10)] == ["new"]
    assert await tail.read(10, block_s=0.01) == []


async def test_an_appended_stream_can_expire(redis: Redis) -> None:
    """Reply streams of ingresses that are long gone."""
    await streams.append(redis, STREAM, "k", "a", b"x", maxlen=10, ttl_s=30)
    assert 0 < await redis.ttl(STREAM) <= 30


async def test_exactly_one_of_two_racing_transitions_wins_and_writes_one_event(redis: Redis, keys: Keys) -> None:
    """Two services that both believe they moved a replica."""
    registry = Registry(redis, keys)
    for round_ in range(20):
        await registry.register(replica(), lease_ttl_s=30)
        await redis.delete(keys.events)
        targets = (ReplicaState.IDLE, ReplicaState.COMBINED)
        won = await asyncio.gather(
            *(registry.transition("r1", ReplicaState.SERVING, after, f"round {round_}", 1.0) for after in targets)
        )
        assert sorted(won) == [False, True]
        events = [messages.decode(entry.data) for entry in streams.parse(keys.events, await redis.xrange(keys.events))]
        assert [event.after for event in events if isinstance(event, messages.StateChanged)] == [
            targets[won.index(True)]
        ]
        assert (await registry.replicas())["r1"].state is targets[won.index(True)]


async def test_a_replica_whose_lease_ran_out_is_not_alive(redis: Redis, keys: Keys) -> None:
    """Requests that are sent to a replica which stopped its heartbeat."""
    registry = Registry(redis, keys)
    await registry.register(replica(), lease_ttl_s=30)
    await registry.update("r1", ready=False, quality=1.25)
    info = (await registry.replicas())["r1"]
    assert (info.alive, info.ready, info.quality) == (True, False, 1.25)
    await redis.delete(keys.lease("r1"))
    assert not (await registry.replicas())["r1"].alive
    await registry.heartbeat("r1", "i1", 30)
    assert (await registry.replicas())["r1"].alive
    await registry.remove("r1", "test", 1.0)
    assert await registry.replicas() == {}


async def test_a_lease_has_one_holder_and_a_token_that_never_returns(redis: Redis, keys: Keys) -> None:
    """A stale leader whose token is still taken for the current one."""
    first, second = (Lease(redis, keys, "stream", holder, ttl_s=30) for holder in ("a", "b"))
    token = await first.hold()
    assert token is not None
    assert await second.hold() is None
    assert await first.hold() == token
    await redis.delete(first.key)
    assert await second.hold() not in (None, token)
    assert await first.hold() is None
    await first.release()
    assert await first.hold() is None
    await second.release()
    assert await first.hold() not in (None, token)
    await redis.flushall()
    assert await first.hold() not in (None, token), "a broker that lost everything counts anew"
    await redis.set(first.key, "somebody")
    assert await first.hold() is not None, "a lease that never ends is none"


async def test_a_blob_comes_back_whole_or_not_at_all(redis: Redis) -> None:
    """A half-written or damaged adapter that is loaded."""
    data = os.urandom(5 * blobs.CHUNK_BYTES // 2)
    assert await blobs.get(redis, "b") is None
    await blobs.put(redis, "b", data, b"about", ttl_s=30)
    assert await blobs.get(redis, "b") == (data, b"about")
    assert await blobs.meta(redis, "b") == b"about"
    assert await redis.hlen("b") == 3 + 3
    await redis.hset("b", "chunk:1", b"other")
    with pytest.raises(AdapterError, match="damaged"):
        await blobs.get(redis, "b")


async def test_each_given_up_request_is_reported_lost_once(redis: Redis, keys: Keys) -> None:
    """Two that notice a death and tell the ingress twice, or forget a request."""
    for number in range(10):
        request = Request(
            id=f"q{number}",
            ingress="i1",
            model="m",
            prompt=(1,),
            sampling=SamplingParams(),
            slo=Slo("s"),
            arrival_s=1.0,
            deadline_s=2.0,
        )
        await streams.append(redis, keys.subflow("r1"), "request", request.id, messages.encode(request))
    await WorkQueue(redis, keys.subflow("r1"), GROUP, "r1", AckPolicy.BY_HANDLER).create()
    counts = await asyncio.gather(*(give_up_subflow(redis, keys, "r1", batch=3) for _ in range(2)))
    lost: list[str] = []
    for entry in streams.parse("", await redis.xrange(keys.replies("i1"))):
        reply = messages.decode(entry.data)
        assert isinstance(reply, Replies)
        lost += [item.id for item in reply.items if isinstance(item, Lost)]
    assert sum(counts) == 10
    assert sorted(lost) == sorted(f"q{number}" for number in range(10))
    assert await redis.xlen(keys.subflow("r1")) == 0


async def test_patience_outlasts_a_restart_of_the_broker_and_ends_at_its_deadline() -> None:
    """A service that dies of one refused connection, or waits for ever."""
    server = Broker()
    server.start()
    try:
        async with connection(server.url) as client:
            await client.set("a", "b")
            server.stop(signal.SIGKILL)
            with pytest.raises(BrokerError, match="broker away"):
                await patiently(lambda: client.get("a"), deadline_s=0.2)
            waiting = asyncio.create_task(patiently(lambda: client.set("a", "c"), deadline_s=30))
            server.start()
            assert await waiting
    finally:
        server.close()


async def test_a_connection_that_is_lost_under_a_watched_key_counts_as_away() -> None:
    """A launcher that dies of redis-py's word for a changed key when it was the broker that died."""
    server = Broker()
    server.start()

    async def turn() -> bytes:
        async with client.pipeline(transaction=True) as pipe:
            await pipe.watch("a")
            turns.append(len(turns))
            if len(turns) == 1:
                server.stop(signal.SIGKILL)
                server.start()
            return bytes(await pipe.get("a"))

    turns: list[int] = []
    try:
        async with connection(server.url) as client:
            await client.set("a", "b")
            assert await patiently(turn, deadline_s=30) == b"b"
            assert len(turns) == 2
    finally:
        server.close()


def test_a_connection_that_closes_under_a_command_counts_as_away(broker: Broker) -> None:
    """A service that dies of the event loop's own error in the moment in which the broker does."""

    async def torn() -> None:
        async with connection(broker.url) as client:
            line = client.connection_pool.make_connection()
            await line.connect()
            line._writer.transport.abort()
            await asyncio.sleep(0)
            with pytest.raises(AWAY):
                await line.send_command("PING", check_health=False)

    uvloop.run(torn())


async def test_ticks_do_not_drift_or_bunch() -> None:
    """A loop that fires a burst of missed ticks after a stall."""
    clock = ManualClock(0.0)
    seen: list[float] = []
    async for now in ticks(1.0, clock):
        seen.append(now)
        if len(seen) == 5:
            break
        clock.time_s += 0.25 if len(seen) != 2 else 3.5
    assert seen == [0.0, 1.0, 4.5, 5.0, 6.0]


async def test_a_damaged_registry_entry_is_skipped(redis: Redis, keys: Keys) -> None:
    """One bad hash that ends every service which looks at the registry."""
    registry = Registry(redis, keys)
    await registry.register(replica("r1"), lease_ttl_s=30)
    await registry.register(replica("r2"), lease_ttl_s=30)
    await redis.hset(keys.replica("r1"), "infer_batch_max", b"\xff")
    await redis.sadd(keys.replicas, "r3")
    assert list(await registry.replicas()) == ["r2"]


async def test_what_a_tail_has_read_can_be_dropped_and_nothing_else(redis: Redis) -> None:
    """Megabytes of replies that were delivered long ago, or one that is dropped before it was read."""
    tail = Tail(redis, STREAM)
    await tail.start("0")
    await tail.drop_read()
    for number in range(450):
        await streams.append(redis, STREAM, "reply", str(number), b"x")
    assert len(await tail.read(400, 0)) == 400
    await tail.drop_read()
    assert 50 < await redis.xlen(STREAM) < 250
    assert [entry.id for entry in await tail.read(400, 0)] == [str(number) for number in range(400, 450)]
