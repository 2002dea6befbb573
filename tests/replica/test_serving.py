"""The inference process on the Redis path, with an engine that needs no model."""

from __future__ import annotations

import hashlib
from functools import partial

import msgspec
import pytest
from redis.asyncio import Redis

from collm_common import blobs, messages, streams
from collm_common.keys import Keys
from collm_common.messages import Delta, Done, Failed, InferenceReport, Reply
from collm_common.registry import Registry
from collm_common.requeue import GROUP
from collm_common.types import AdapterManifest, AdapterRef, Quality, ReplicaInfo, ReplicaState, SamplingParams
from collm_replica.adapter_feed import Loaded
from collm_replica.channel import Training
from tests.replica.support import replies, request, send, serving, settings
from tests.support.waiting import eventually


def answer(said: list[Reply], id_: str) -> list[int]:
    tokens: list[int] = []
    for reply in said:
        if isinstance(reply, Delta) and reply.id == id_:
            assert reply.offset == len(tokens)
            tokens += reply.tokens
    return tokens


async def store_adapter(redis: Redis, keys: Keys, name: str, version: int) -> None:
    manifest = AdapterManifest(name, version, "", 4, 8.0, ("q_proj",), hashlib.sha256(b"x").hexdigest(), size_bytes=1)
    await blobs.put(redis, keys.adapter_version(name, version), b"x", msgspec.msgpack.encode(manifest))
    await redis.hset(keys.adapter(name), mapping={"version": version, "model": "m"})
    await redis.sadd(keys.adapters, name)


async def test_a_request_is_answered_and_its_entry_is_gone(redis: Redis, keys: Keys) -> None:
    """An answer without its acknowledgement, or the other way round."""
    async with serving(redis, settings()):
        await send(redis, keys, request(reference=(8, 9)))
        await eventually(lambda: _is_done(redis, keys, "q1"))
    said = await replies(redis, keys)
    assert answer(said, "q1") == [5, 6, 7, 5]
    assert [reply.finish for reply in said if isinstance(reply, Delta)][-1] == "length"
    done = said[-1]
    assert isinstance(done, Done)
    assert done.quality is not None
    assert done.quality.tokens == 2
    assert await redis.xlen(keys.subflow("r1")) == 0
    assert await redis.ttl(keys.replies("i1")) > 0


async def test_draining_finishes_what_is_here_and_takes_nothing_new(redis: Redis, keys: Keys) -> None:
    """A shutdown that drops a request in the middle of its answer."""
    long = SamplingParams(max_tokens=50)
    async with serving(redis, settings(), iteration_s=lambda sequences, tokens: 0.002) as running:
        await send(redis, keys, request(sampling=long))
        await eventually(lambda: running.engine.running == 1)
    assert answer(await replies(redis, keys), "q1") == [(5, 6, 7)[i % 3] for i in range(50)]


async def test_a_cancelled_request_stops_and_leaves_nothing_behind(redis: Redis, keys: Keys) -> None:
    """Tokens made for a client that left, or an entry that is never acknowledged."""
    async with serving(redis, settings(), iteration_s=lambda sequences, tokens: 0.002) as running:
        await send(redis, keys, request(sampling=SamplingParams(max_tokens=900)))
        await eventually(lambda: running.engine.running == 1)
        running.cancel("q1")
        await eventually(lambda: _is_empty(redis, keys))
        assert not running.engine.has_work
    assert not any(isinstance(reply, Done) for reply in await replies(redis, keys))


async def test_a_repeated_delivery_changes_nothing_and_a_newer_attempt_takes_over(redis: Redis, keys: Keys) -> None:
    """At-least-once delivery that answers twice, or an attempt that is lost because its id is known."""
    async with serving(redis, settings(), iteration_s=lambda sequences, tokens: 0.002) as running:
        await send(redis, keys, request(sampling=SamplingParams(max_tokens=300)))
        await eventually(lambda: running.engine.running == 1)
        await send(redis, keys, request(sampling=SamplingParams(max_tokens=300)))
        await send(redis, keys, request(attempt=1, prefix=(5, 6), sampling=SamplingParams(max_tokens=6)))
        await eventually(lambda: _is_done(redis, keys, "q1"))
        await eventually(lambda: _is_empty(redis, keys))
    second = [reply for reply in await replies(redis, keys) if isinstance(reply, Delta) and reply.attempt == 1]
    assert [reply.offset for reply in second] == [2, 3, 4, 5]
    assert sum(isinstance(reply, Done) for reply in await replies(redis, keys)) == 1


async def test_what_cannot_be_served_is_refused_with_a_reason(redis: Redis, keys: Keys) -> None:
    """A request that vanishes because it is wrong."""
    async with serving(redis, settings()):
        await send(redis, keys, request("long", prompt=(1,) * 2000))
        await send(redis, keys, request("adapter", adapter="nobody"))
        await redis.xadd(keys.subflow("r1"), streams.fields("request", "bad", b"garbage"))
        await eventually(lambda: _is_empty(redis, keys))
    said = {reply.id: reply for reply in await replies(redis, keys) if isinstance(reply, Failed)}
    assert {id_: (reply.status, reply.code) for id_, reply in said.items()} == {
        "long": (400, "context_length_exceeded"),
        "adapter": (404, "model_not_found"),
    }


async def test_a_request_keeps_the_version_it_was_admitted_with(redis: Redis, keys: Keys) -> None:
    """A swap that changes the adapter in the middle of an answer."""
    await store_adapter(redis, keys, "desk", 1)
    async with serving(redis, settings(), iteration_s=lambda sequences, tokens: 0.002) as running:
        await running.versions.load("desk", 1)
        await send(redis, keys, request("old", adapter="desk", sampling=SamplingParams(max_tokens=200)))
        await eventually(lambda: running.engine.running == 1)
        await store_adapter(redis, keys, "desk", 2)
        await running.versions.load("desk", 2)
        await send(redis, keys, request("new", adapter="desk"))
        await send(redis, keys, request("pinned", adapter="desk", version="1"))
        for id_ in ("old", "new", "pinned"):
            await eventually(partial(_is_done, redis, keys, id_))
    said = [reply for reply in await replies(redis, keys) if isinstance(reply, Delta)]
    versions = {id_: {str(reply.adapter) for reply in said if reply.id == id_} for id_ in ("old", "new", "pinned")}
    assert versions == {"old": {"desk@v1"}, "new": {"desk@v2"}, "pinned": {"desk@v1"}}


@pytest.mark.parametrize(
    "damage",
    [
        {"key": "adapter", "field": "version", "value": "many"},
        {"key": "blob", "field": "bytes", "value": "x"},
        {"key": "blob", "field": "meta", "value": b"\xff"},
        {"key": "blob", "field": "sha256", "value": b"\xff"},
    ],
)
async def test_a_damaged_adapter_fails_its_requests_and_nothing_else(
    redis: Redis, keys: Keys, damage: dict[str, str | bytes]
) -> None:
    """A request for it that takes the inference process down, and with each attempt the one of another replica."""
    await store_adapter(redis, keys, "desk", 1)
    key = keys.adapter("desk") if damage["key"] == "adapter" else keys.adapter_version("desk", 1)
    await redis.hset(key, str(damage["field"]), damage["value"])
    async with serving(redis, settings()):
        await send(redis, keys, request("current", adapter="desk"))
        await send(redis, keys, request("pinned", adapter="desk", version="1"))
        await send(redis, keys, request("base"))
        await eventually(lambda: _is_empty(redis, keys))
    said = await replies(redis, keys)
    lost = {"current": 404} if damage["key"] == "adapter" else {"current": 404, "pinned": 404}
    assert {reply.id: reply.status for reply in said if isinstance(reply, Failed)} == lost
    assert {reply.id for reply in said if isinstance(reply, Done)} == {"current", "pinned", "base"} - lost.keys()


async def test_an_entry_that_never_arrived_is_served_and_a_forgotten_one_is_removed(redis: Redis, keys: Keys) -> None:
    """A delivery that a connection lost, or an acknowledgement that a broker lost, keeps its place for ever."""
    async with serving(redis, settings()) as running:
        await send(redis, keys, request("first"))
        await eventually(lambda: _is_done(redis, keys, "first"))
        await send(redis, keys, request("running", attempt=1, sampling=SamplingParams(max_tokens=200)))
        await eventually(lambda: running.engine.has_work)
        for id_ in ("lost", "running"):
            async with redis.pipeline(transaction=True) as pipe:
                entry = streams.fields("request", id_, messages.encode(request(id_)))
                pipe.xadd(keys.subflow("r1"), entry)
                pipe.xreadgroup(GROUP, "r1", {keys.subflow("r1"): ">"})
                await pipe.execute()
        await eventually(lambda: _is_done(redis, keys, "lost"))
        await eventually(lambda: _is_empty(redis, keys))


async def test_a_group_made_anew_does_not_take_entries_of_running_requests(redis: Redis, keys: Keys) -> None:
    """An entry delivered again is removed while its request runs: nobody gives it back when the replica dies."""
    async with serving(redis, settings(), iteration_s=lambda sequences, tokens: 0.002) as running:
        await send(redis, keys, request(sampling=SamplingParams(max_tokens=900)))
        await eventually(lambda: running.engine.running == 1)
        await redis.xgroup_destroy(keys.subflow("r1"), GROUP)
        await send(redis, keys, request("next"))
        await eventually(lambda: _is_done(redis, keys, "next"))
        assert await redis.xlen(keys.subflow("r1")) == 1
        running.cancel("q1")
        await eventually(lambda: _is_empty(redis, keys))


async def test_a_request_waits_for_an_adapter_slot(redis: Redis, keys: Keys) -> None:
    """A slot that is taken for a moment, told as an unknown model; a client that left while it waited."""
    for name in ("desk", "shop", "gone"):
        await store_adapter(redis, keys, name, 1)
    async with serving(redis, settings(slots=1), iteration_s=lambda sequences, tokens: 0.002) as running:
        await running.versions.load("desk", 1)
        await send(redis, keys, request("busy", adapter="desk", sampling=SamplingParams(max_tokens=100)))
        await eventually(lambda: running.engine.running == 1)
        await send(redis, keys, request("current", adapter="shop"))
        await send(redis, keys, request("pinned", adapter="shop", version="1"))
        await send(redis, keys, request("left", adapter="gone"))
        await eventually(lambda: running.parked == 3)
        running.cancel("left")
        await eventually(partial(_all_done, redis, keys, {"busy", "current", "pinned"}))
        await eventually(lambda: _is_empty(redis, keys))
    said = await replies(redis, keys)
    assert not any(isinstance(reply, Failed) or reply.id == "left" for reply in said)


async def test_where_no_slot_can_become_free_a_request_may_come_again(redis: Redis, keys: Keys) -> None:
    """A request that waits for ever beside a snapshot that nobody may throw out."""
    await store_adapter(redis, keys, "shop", 1)
    async with serving(redis, settings(slots=1)) as running:
        await running.versions.take_snapshot(Loaded(AdapterRef("desk", "0.2"), {}, 4, 8.0))
        await eventually(lambda: running.engine.versions.get("desk") == AdapterRef("desk", "0.2"))
        await send(redis, keys, request("current", adapter="shop"))
        await send(redis, keys, request("pinned", adapter="shop", version="1"))
        await eventually(lambda: _is_refused(redis, keys, 2))
        assert running.engine.versions == {"desk": AdapterRef("desk", "0.2")}
    said = {reply.id: (reply.status, reply.code) for reply in await replies(redis, keys) if isinstance(reply, Failed)}
    assert said == dict.fromkeys(("current", "pinned"), (503, "adapter_slots_full"))


async def _is_refused(redis: Redis, keys: Keys, count: int) -> bool:
    return sum(isinstance(reply, Failed) for reply in await replies(redis, keys)) == count


async def test_more_adapters_than_slots_take_turns(redis: Redis, keys: Keys) -> None:
    """An adapter that is refused because others were loaded first, and one that is gone for ever once it made room."""
    names = [f"desk{number}" for number in range(5)]
    for name in names:
        await store_adapter(redis, keys, name, 1)
    async with serving(redis, settings(slots=2)) as running:
        for turn in range(2):
            for name in names:
                await send(redis, keys, request(f"{name}-{turn}", adapter=name))
            await eventually(partial(_all_done, redis, keys, {f"{name}-{turn}" for name in names}))
        assert len(running.engine.versions) == 2
    said = [reply for reply in await replies(redis, keys) if isinstance(reply, Delta)]
    assert all(str(reply.adapter) == f"{reply.id.split('-')[0]}@v1" for reply in said)


async def _all_done(redis: Redis, keys: Keys, ids: set[str]) -> bool:
    return ids <= {reply.id for reply in await replies(redis, keys) if isinstance(reply, Done)}


async def test_an_unloaded_adapter_is_kept_by_who_has_it_alone(redis: Redis, keys: Keys) -> None:
    """A request torn off in mid-answer or while it waits, and a slot that stays taken."""
    await store_adapter(redis, keys, "desk", 1)
    async with serving(redis, settings(slots=1), iteration_s=lambda sequences, tokens: 0.002) as running:
        await running.versions.load("desk", 1)
        running.limit(1)
        for name in ("runs", "waits"):
            await send(redis, keys, request(name, adapter="desk", sampling=SamplingParams(max_tokens=60)))
        await eventually(lambda: running.engine.waiting == 1)
        await redis.delete(keys.adapter("desk"))
        running.versions.unload("desk")
        await send(redis, keys, request("late", adapter="desk"))
        await eventually(partial(_all_done, redis, keys, {"runs", "waits"}))
        await eventually(lambda: _is_refused(redis, keys, 1))
        assert running.engine.versions == {}
    said = await replies(redis, keys)
    assert {str(reply.adapter) for reply in said if isinstance(reply, Delta)} == {"desk@v1"}
    assert [(reply.id, reply.status) for reply in said if isinstance(reply, Failed)] == [("late", 404)]


async def test_an_adapter_without_a_version_yet_is_the_base_model(redis: Redis, keys: Keys) -> None:
    """A name that clients may use before its first training is refused."""
    await redis.hset(keys.adapter("desk"), mapping={"version": 0, "model": "m"})
    async with serving(redis, settings()):
        await send(redis, keys, request(adapter="desk"))
        await eventually(lambda: _is_done(redis, keys, "q1"))
    assert answer(await replies(redis, keys), "q1") == [5, 6, 7, 5]


async def test_an_old_version_is_fetched_for_who_pins_it(redis: Redis, keys: Keys) -> None:
    """A pinned version that is in Redis but not in the engine, answered 404; its slot must be free afterwards."""
    await store_adapter(redis, keys, "desk", 1)
    await store_adapter(redis, keys, "desk", 2)
    async with serving(redis, settings(slots=2)) as running:
        for number in range(3):
            await send(redis, keys, request(f"q{number}", adapter="desk", version="1"))
            await eventually(partial(_is_done, redis, keys, f"q{number}"))
        assert running.engine.versions == {}
    assert {str(reply.adapter) for reply in await replies(redis, keys) if isinstance(reply, Delta)} == {"desk@v1"}


async def test_a_snapshot_that_died_with_its_replica_is_replaced_by_the_current_version(
    redis: Redis, keys: Keys
) -> None:
    """A request in mid-answer that fails because its pinned version is nowhere any more; a first attempt must fail."""
    await store_adapter(redis, keys, "desk", 1)
    async with serving(redis, settings()):
        await send(redis, keys, request("moved", adapter="desk", version="0.4", attempt=1, prefix=(5,)))
        await send(redis, keys, request("typo", adapter="desk", version="0.4"))
        await eventually(lambda: _is_empty(redis, keys))
    said = await replies(redis, keys)
    assert {str(reply.adapter) for reply in said if isinstance(reply, Delta)} == {"desk@v1"}
    assert [(reply.id, reply.status) for reply in said if isinstance(reply, Failed)] == [("typo", 404)]


async def test_a_snapshot_never_takes_the_place_of_something_newer(redis: Redis, keys: Keys) -> None:
    """A late snapshot of an old round that hides the version which was published after it."""
    await store_adapter(redis, keys, "desk", 1)
    async with serving(redis, settings()) as running:
        await running.versions.take_snapshot(Loaded(AdapterRef("desk", "0.2"), {}, 4, 8.0))
        await eventually(lambda: running.engine.versions.get("desk") == AdapterRef("desk", "0.2"))
        await running.versions.load("desk", 1)
        await eventually(lambda: running.engine.versions["desk"] == AdapterRef("desk", "1"))
        await running.versions.take_snapshot(Loaded(AdapterRef("desk", "0.3"), {}, 4, 8.0))
        await running.versions.take_snapshot(Loaded(AdapterRef("desk", "1.1"), {}, 4, 8.0))
        await eventually(lambda: running.engine.versions["desk"] == AdapterRef("desk", "1.1"))


async def test_a_load_waits_for_a_free_slot(redis: Redis, keys: Keys) -> None:
    """A published version that is forgotten because every slot was in use when it came."""
    await store_adapter(redis, keys, "desk", 1)
    async with serving(redis, settings(slots=1), iteration_s=lambda sequences, tokens: 0.002) as running:
        await running.versions.load("desk", 1)
        await send(redis, keys, request(adapter="desk", sampling=SamplingParams(max_tokens=100)))
        await eventually(lambda: running.engine.running == 1)
        await running.versions.load("desk", 0)
        await store_adapter(redis, keys, "desk", 2)
        await running.versions.load("desk", 2)
        await eventually(lambda: running.engine.versions["desk"] == AdapterRef("desk", "2"))
    assert {str(reply.adapter) for reply in await replies(redis, keys) if isinstance(reply, Delta)} == {"desk@v1"}


async def test_reports_tell_utilisation_batch_and_iteration_times(redis: Redis, keys: Keys) -> None:
    """Telemetry that the idle policy and the latency fits cannot be computed from."""
    info = ReplicaInfo("r1", "m", "i", ReplicaState.COMBINED, ready=True, infer_batch_max=8, context_tokens=64)
    await Registry(redis, keys).register(info, 30)
    async with serving(redis, settings(report_s=0.2), iteration_s=lambda sequences, tokens: 0.002) as running:
        running.reports.training = Training(batch=4, sm_share=0.3)
        running.limit(3)
        for number in range(6):
            await send(redis, keys, request(f"q{number}", sampling=SamplingParams(max_tokens=60)))
        await eventually(lambda: _reported(redis, keys, finished=6))
    reports = await _reports(redis, keys)
    assert max(report.utilisation for report in reports) > 0.1
    assert {report.limit for report in reports} >= {3}
    assert {report.state for report in reports} == {ReplicaState.COMBINED}
    pairs = {i.sizes: i.mean_s for report in reports for i in report.iterations}
    assert {(sizes.train, sizes.sm_share) for sizes in pairs} == {(4, 0.3)}
    assert max(sizes.infer for sizes in pairs) == 3
    assert all(mean_s >= 0.002 for mean_s in pairs.values())
    assert sum(report.output_tokens for report in reports) == 360
    served = [served for report in reports for served in report.served]
    assert sum(one.requests for one in served) == 6
    assert {one.slo.name for one in served} == {"s"}


async def test_reports_tell_how_well_each_adapter_version_did_on_references(redis: Redis, keys: Keys) -> None:
    """Scores without the version that they are of: nobody could tell a regression."""
    info = ReplicaInfo("r1", "m", "i", ReplicaState.SERVING, ready=True, infer_batch_max=8, context_tokens=64)
    await Registry(redis, keys).register(info, 30)
    await store_adapter(redis, keys, "desk", 1)
    async with serving(redis, settings()) as running:
        await running.versions.load("desk", 1)
        for number, reference in enumerate(((8, 9), (8,), ())):
            await send(redis, keys, request(f"q{number}", adapter="desk", reference=reference))
        await send(redis, keys, request("bare", reference=(8, 9)))
        await eventually(lambda: _reported(redis, keys, finished=4))
    said = [reply.quality for reply in await replies(redis, keys) if isinstance(reply, Done) and reply.id != "bare"]
    scored = [one for report in await _reports(redis, keys) for one in report.scored]
    assert {one.adapter for one in scored} == {AdapterRef("desk", "1")}
    told, answered = (Quality.pooled(parts) for parts in ((one.quality for one in scored), filter(None, said)))
    assert told is not None
    assert answered is not None
    assert told.tokens == answered.tokens == 3
    assert told.cross_entropy == pytest.approx(answered.cross_entropy)


async def _reports(redis: Redis, keys: Keys) -> list[InferenceReport]:
    found = [messages.decode(entry.data) for entry in streams.parse("", await redis.xrange(keys.telemetry))]
    return [message for message in found if isinstance(message, InferenceReport)]


async def _reported(redis: Redis, keys: Keys, finished: int) -> bool:
    return sum(report.finished for report in await _reports(redis, keys)) == finished


async def _is_done(redis: Redis, keys: Keys, id_: str) -> bool:
    return any(isinstance(reply, Done) and reply.id == id_ for reply in await replies(redis, keys))


async def _is_empty(redis: Redis, keys: Keys) -> bool:
    return int(await redis.xlen(keys.subflow("r1"))) == 0
