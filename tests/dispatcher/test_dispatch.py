"""The dispatch loop on a real broker, with replicas that need no model."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest
from redis.asyncio import Redis

from collm_common import latency, messages, streams
from collm_common.broker import stop_all
from collm_common.clock import SystemClock
from collm_common.errors import FencedError
from collm_common.keys import Keys
from collm_common.latency import LatencyModel, Line
from collm_common.lease import Lease
from collm_common.messages import Done, Expected, Failed, Lost, ReplicaChanged, Request, StateChanged
from collm_common.registry import Registry
from collm_common.requeue import GROUP
from collm_common.streams import AckPolicy, WorkQueue
from collm_common.types import BatchSizes, ReplicaState, SamplingParams, Slo
from collm_dispatcher.policy.queue import Waiting
from collm_dispatcher.release import Mover
from collm_replica.channel import Ready
from collm_replica.presence import Presence
from tests.dispatcher.support import dispatcher, lengths, offer, register, replica
from tests.replica.support import replies, request
from tests.replica.support import settings as replica_settings
from tests.support.broker import Broker
from tests.support.waiting import eventually

ORIGINAL = Keys().requests("m", "s")


async def finished(redis: Redis, keys: Keys) -> set[str]:
    return {reply.id for reply in await replies(redis, keys) if isinstance(reply, Done)}


async def test_requests_reach_a_replica_and_leave_no_trace(redis: Redis, keys: Keys) -> None:
    """A request that stays in the original stream after its release would be served twice."""
    async with replica(redis, keys), dispatcher(redis):
        await offer(redis, keys, *(request(f"q{n}") for n in range(10)))

        async def done() -> bool:
            return len(await finished(redis, keys)) == 10

        await eventually(done)
    assert await redis.xlen(ORIGINAL) == 0
    assert (await redis.xpending(ORIGINAL, GROUP))["pending"] == 0


async def test_no_more_than_b_are_in_flight_and_the_earliest_deadline_goes_first(redis: Redis, keys: Keys) -> None:
    """A flood into the subflow: then the replica's order counts instead of the deadlines."""
    await register(redis, keys)
    await offer(redis, keys, *(request(f"q{n}", deadline_s=4e9 - n) for n in range(12)))
    async with dispatcher(redis) as running:
        await eventually(lambda: running.leaders and running.leaders["m"].held == 8)
        rows = streams.parse("", await redis.xrange(keys.subflow("r1")))
    assert {row.id for row in rows} == {"q11", "q10", "q9", "q8"}


async def test_room_is_used_as_soon_as_it_is_there(redis: Redis, keys: Keys) -> None:
    """A loop that waits for the next arrival although a replica has room again."""
    async with replica(redis, keys, infer_batch_max=1), dispatcher(redis):
        await offer(redis, keys, *(request(f"q{n}") for n in range(30)))

        async def done() -> bool:
            return len(await finished(redis, keys)) == 30

        await eventually(done, 5)


async def test_a_stale_leader_moves_nothing(redis: Redis, keys: Keys) -> None:
    """A paused process that wakes up after another took over."""
    await register(redis, keys)
    await offer(redis, keys, request())
    old = Lease(redis, keys, "dispatch:m", "old", 30)
    token = await old.hold()
    assert token is not None
    await old.release()
    assert await Lease(redis, keys, "dispatch:m", "new", 30).hold()
    queue = WorkQueue(redis, ORIGINAL, GROUP, "old", AckPolicy.BY_HANDLER)
    await queue.create()
    (entry,) = await queue.read(1, 0)
    item = Waiting(ORIGINAL, entry.entry_id, "q1", "i1", 0, 0.0, 9e9, Slo("s"))
    with pytest.raises(FencedError):
        await Mover(redis, keys).release(old.key, token, "r1", 4, [(item, None)])
    assert await redis.xlen(ORIGINAL) == 1
    assert await lengths(redis, keys, "r1") == [0]


@pytest.mark.parametrize("wrong", [{"state": ReplicaState.IDLE}, {"ready": False}, {"lease_s": 0.001}])
async def test_a_replica_that_must_not_serve_gets_nothing(redis: Redis, keys: Keys, wrong: dict[str, object]) -> None:
    """A decision made on a view of the cell that was a moment old."""
    await register(redis, keys, **wrong)  # type: ignore[arg-type]
    await eventually(lambda: _lease_as_wanted(redis, keys, "lease_s" not in wrong))
    await offer(redis, keys, request())
    lease = Lease(redis, keys, "dispatch:m", "d1", 30)
    token = await lease.hold()
    assert token is not None
    (row,) = streams.parse(ORIGINAL, await redis.xrange(ORIGINAL))
    item = Waiting(ORIGINAL, row.entry_id, "q1", "i1", 0, 0.0, 9e9, Slo("s"))
    assert await Mover(redis, keys).release(lease.key, token, "r1", 4, [(item, None)]) == (0, 0)
    assert await redis.xlen(ORIGINAL) == 1


async def _lease_as_wanted(redis: Redis, keys: Keys, there: bool) -> bool:
    return bool(await redis.exists(keys.lease("r1"))) is there


async def test_one_of_two_leads_and_the_other_takes_over_with_the_backlog(redis: Redis, keys: Keys) -> None:
    """Entries that a dead dispatcher had read are stuck with it for ever."""
    await offer(redis, keys, *(request(f"q{n}") for n in range(6)))
    async with dispatcher(redis, "d2") as second:
        async with dispatcher(redis, "d1") as first:
            await eventually(lambda: "m" in first.leaders and "m" in second.leaders)
            both = {"d1": first.leaders["m"], "d2": second.leaders["m"]}
            await eventually(lambda: sum(leader.leads for leader in both.values()) == 1)
            await eventually(lambda: sum(leader.held for leader in both.values()) == 6)
            assert sum(leader.leads for leader in both.values()) == 1
        await eventually(lambda: second.leaders["m"].leads and second.leaders["m"].held == 6)
        async with replica(redis, keys):

            async def done() -> bool:
                return len(await finished(redis, keys)) == 6

            await eventually(done)


async def test_a_cancelled_entry_is_skipped(redis: Redis, keys: Keys) -> None:
    """A client that left while its request waited is served all the same, or blocks the queue."""
    await offer(redis, keys, request("gone"), request("here"))
    async with dispatcher(redis) as running:
        await eventually(lambda: running.leaders and running.leaders["m"].held == 2)
        (row, _) = await redis.xrange(ORIGINAL)
        await redis.xack(ORIGINAL, GROUP, row[0])
        await redis.xdel(ORIGINAL, row[0])
        async with replica(redis, keys):

            async def done() -> bool:
                return await finished(redis, keys) == {"here"}

            await eventually(done)
            await eventually(lambda: running.leaders["m"].held == 0)


async def test_past_its_deadline_a_request_is_refused_or_served_late_as_its_class_says(
    redis: Redis, keys: Keys
) -> None:
    """A request that is dropped silently, or that takes the place of one that could still be in time."""
    strict, patient = Slo("strict", e2e_s=1, late="reject"), Slo("patient", e2e_s=1)
    await offer(redis, keys, request("no", slo=strict, deadline_s=1.0), request("late", slo=patient, deadline_s=1.0))
    async with replica(redis, keys), dispatcher(redis):

        async def answered() -> bool:
            said = await replies(redis, keys)
            refused = [(r.id, r.status, r.code) for r in said if isinstance(r, Failed)]
            return refused == [("no", 503, "rejected-ttl-expired")] and await finished(redis, keys) == {"late"}

        await eventually(answered)
    assert await redis.xlen(keys.requests("m", "strict")) == 0


async def test_a_dead_replicas_requests_go_back_and_the_cell_is_told(redis: Redis, keys: Keys) -> None:
    """A client that waits for ever for a replica that is gone."""
    await register(redis, keys)
    await offer(redis, keys, request())
    async with dispatcher(redis):
        await eventually(lambda: _moved(redis, keys))
        await redis.delete(keys.lease("r1"))

        async def lost() -> bool:
            return [type(reply) for reply in await replies(redis, keys)] == [Lost]

        await eventually(lost)
        await eventually(lambda: _events(redis, keys, ReplicaChanged))
    assert await lengths(redis, keys, "r1") == [0]
    assert (await Registry(redis, keys).replicas())["r1"].ready is False


async def _moved(redis: Redis, keys: Keys) -> bool:
    return await lengths(redis, keys, "r1") == [1]


async def _events(redis: Redis, keys: Keys, kind: type) -> list[messages.AnyMessage]:
    found = [messages.decode(entry.data) for entry in streams.parse("", await redis.xrange(keys.events))]
    return [message for message in found if isinstance(message, kind)]


async def test_an_idle_replica_is_promoted_when_nobody_else_serves(redis: Redis, keys: Keys) -> None:
    """Requests that wait although a replica is there."""
    async with replica(redis, keys, state=ReplicaState.IDLE), dispatcher(redis):
        await offer(redis, keys, request())

        async def done() -> bool:
            return await finished(redis, keys) == {"q1"}

        await eventually(done)
    (event,) = await _events(redis, keys, StateChanged)
    assert isinstance(event, StateChanged)
    assert (event.before, event.after) == (ReplicaState.IDLE, ReplicaState.SERVING)


async def test_overload_pauses_training_and_calm_resumes_it(redis: Redis, keys: Keys) -> None:
    """Training that goes on while requests miss their deadlines, or that never starts again."""
    await register(redis, keys, state=ReplicaState.COMBINED, infer_batch_max=1)
    await offer(redis, keys, *(request(f"q{n}") for n in range(5)))

    async def commands() -> list[str]:
        return [entry.kind for entry in streams.parse("", await redis.xrange(keys.control("r1")))]

    async with dispatcher(redis):

        async def paused() -> bool:
            return await commands() == ["pause_training"]

        async def resumed() -> bool:
            return await commands() == ["pause_training", "resume_training"]

        await eventually(paused)
        async with replica(redis, keys, state=ReplicaState.COMBINED, infer_batch_max=1):
            await eventually(resumed)


async def test_garbage_in_a_stream_is_dropped_and_the_rest_served(redis: Redis, keys: Keys) -> None:
    """One bad entry that stops a whole stream."""
    await redis.sadd(keys.streams, "m|s")
    await redis.xadd(ORIGINAL, streams.fields("request", "bad", b"garbage"))
    async with replica(redis, keys), dispatcher(redis):
        await offer(redis, keys, request())

        async def done() -> bool:
            return await finished(redis, keys) == {"q1"} and await redis.xlen(ORIGINAL) == 0

        await eventually(done)


def _many(count: int, tokens: int) -> list[Request]:
    return [request(f"q{n}", sampling=SamplingParams(max_tokens=tokens)) for n in range(count)]


async def test_replicas_share_the_load(redis: Redis, keys: Keys) -> None:
    """All requests on one replica while another has room."""
    await register(redis, keys, "r1")
    await register(redis, keys, "r2")
    await offer(redis, keys, *_many(4, 4))
    async with dispatcher(redis):

        async def shared() -> bool:
            return await lengths(redis, keys, "r1", "r2") == [2, 2]

        await eventually(shared)


async def test_a_fitted_replica_runs_the_batch_that_keeps_the_objective(redis: Redis, keys: Keys) -> None:
    """A fit that nobody reads: every replica is filled to the engine's limit, and every request is late."""
    model = LatencyModel(infer=Line(base_s=0.01, per_sequence_s=0.01), output_tokens=10)
    await register(redis, keys)
    await latency.save(redis, keys, "r1", model)
    slo = Slo("s", e2e_s=0.4)
    await offer(redis, keys, *(request(f"q{n}", slo=slo, deadline_s=4e9) for n in range(4)))
    async with dispatcher(redis) as running:

        async def two() -> bool:
            return await lengths(redis, keys, "r1") == [2] and running.leaders["m"].held == 2

        await eventually(two)


async def test_a_combined_replica_runs_at_most_the_coordinators_cap(redis: Redis, keys: Keys) -> None:
    """Training and a full batch at once: both too slow."""
    await register(redis, keys, state=ReplicaState.COMBINED)
    await latency.save_sizes(redis, keys, "r1", BatchSizes(train=2, infer=1), "test")
    await offer(redis, keys, *(request(f"q{n}") for n in range(3)))
    async with dispatcher(redis, pause_s=60) as running:

        async def one() -> bool:
            return await lengths(redis, keys, "r1") == [1] and running.leaders["m"].held == 2

        await eventually(one)


async def test_a_leader_that_was_replaced_waits_and_leads_again(redis: Redis, keys: Keys) -> None:
    """A dispatcher that slept through its lease and dies when it finds another one leading."""
    async with replica(redis, keys), dispatcher(redis) as running:
        await offer(redis, keys, request("before"))
        await eventually(lambda: running.leaders and running.leaders["m"].leads)
        await redis.set(keys.lease("dispatch:m"), "other#9.1.1", px=400)
        await eventually(lambda: not running.leaders["m"].leads)
        await eventually(lambda: running.leaders["m"].leads)
        await offer(redis, keys, request("after"))

        async def done() -> bool:
            return await finished(redis, keys) == {"before", "after"}

        await eventually(done)
        assert not any(task.done() for task in running.tasks)


async def test_an_entry_that_was_delivered_but_never_arrived_is_read_again(redis: Redis, keys: Keys) -> None:
    """A connection that breaks under a read: its entries stay with the leader that never saw them."""
    await offer(redis, keys, request("lost"))
    queue = WorkQueue(redis, ORIGINAL, GROUP, "d1", AckPolicy.BY_HANDLER)
    await queue.create()
    assert await queue.read(1, 0)
    async with replica(redis, keys), dispatcher(redis, "d1"):

        async def done() -> bool:
            return await finished(redis, keys) == {"lost"}

        await eventually(done)


async def test_a_held_back_request_goes_out_when_its_time_is_up(redis: Redis, keys: Keys) -> None:
    """A request that waits for others which never come."""
    await latency.save(redis, keys, "r1", LatencyModel(infer=Line(base_s=0.001)))
    async with replica(redis, keys), dispatcher(redis, hold_s=0.2):
        sent_s = time.time()
        await offer(redis, keys, request(arrival_s=sent_s, deadline_s=sent_s + 60))

        async def done() -> bool:
            return await finished(redis, keys) == {"q1"}

        await eventually(done)
        assert time.time() - sent_s >= 0.2


async def test_the_loop_goes_on_after_the_broker_was_away(redis: Redis, keys: Keys, broker: Broker) -> None:
    """A leader that dies, or declares every replica dead, because the broker was restarted."""
    async with replica(redis, keys), dispatcher(redis, away_grace_s=30) as running:
        await offer(redis, keys, request("before"))
        await eventually(lambda: running.leaders and running.leaders["m"].leads)
        broker.stop()
        broker.start()
        await offer(redis, keys, request("after"))

        async def done() -> bool:
            return "after" in await finished(redis, keys)

        await eventually(done)


async def test_a_stream_that_is_gone_is_made_again(redis: Redis, keys: Keys) -> None:
    """A dispatcher that dies because the broker lost its keys."""
    async with replica(redis, keys), dispatcher(redis) as running:
        await offer(redis, keys, request("before"))
        await eventually(lambda: running.leaders and running.leaders["m"].leads)
        await redis.delete(ORIGINAL)
        term = running.leaders["m"].term
        assert term is not None
        await term.backlog.reclaim()
        await offer(redis, keys, request("after"))

        async def done() -> bool:
            return "after" in await finished(redis, keys)

        await eventually(done)


async def test_a_replica_that_was_declared_gone_and_lives_serves_again(redis: Redis, keys: Keys) -> None:
    """A supervisor that was held up for longer than its lease never gets another request."""
    presence = Presence(replica_settings(lease_ttl_s=0.4), redis, SystemClock())
    await presence.up(Ready(base_digest="", context_tokens=256, infer_batch_max=4), "")
    async with dispatcher(redis):
        await offer(redis, keys, request())
        await eventually(lambda: _is_ready(redis, keys, False))
        beating = asyncio.create_task(presence.beat())
        await eventually(lambda: _is_ready(redis, keys, True))
        await offer(redis, keys, request("q2"))
        await eventually(lambda: _moved(redis, keys))
    await stop_all(beating)


async def _is_ready(redis: Redis, keys: Keys, wanted: bool) -> bool:
    return (await Registry(redis, keys).replicas())["r1"].ready is wanted


async def test_training_is_taken_back_in_steps_and_given_back_whole(redis: Redis, keys: Keys) -> None:
    """A trainer that is paused and keeps its small batch of requests, or resumes with another B than it had."""
    sizes = BatchSizes(train=4, infer=2)
    await register(redis, keys, state=ReplicaState.COMBINED)
    await latency.save_sizes(redis, keys, "r1", sizes, "test")
    await offer(redis, keys, *(request(f"q{n}") for n in range(40)))

    async def told() -> list[tuple[str, BatchSizes | None]]:
        found = [messages.decode(entry.data) for entry in streams.parse("", await redis.xrange(keys.control("r1")))]
        return [(messages.kind(m), m.sizes if isinstance(m, messages.Configure) else None) for m in found]

    shrunk = [("configure", BatchSizes(train=2, infer=2))]
    paused = [*shrunk, ("pause_training", None), ("configure", BatchSizes(train=2, infer=4))]

    async def stands_still() -> bool:
        return await told() == paused and await lengths(redis, keys, "r1") == [4]

    async def goes_on() -> bool:
        return await told() == [*paused, ("configure", sizes), ("resume_training", None)]

    async with dispatcher(redis, stop_s=60):
        await eventually(stands_still)
        assert await latency.load_sizes(redis, keys, "r1") == BatchSizes(train=0, infer=4)
        async with replica(redis, keys, state=ReplicaState.COMBINED):
            await latency.save_sizes(redis, keys, "r1", BatchSizes(train=0, infer=4), "test")
            await eventually(goes_on)
    assert await latency.load_sizes(redis, keys, "r1") == sizes


async def test_overload_that_lasts_makes_a_combined_replica_serve(redis: Redis, keys: Keys) -> None:
    """A replica that is paused for ever while requests wait and its round waits for it."""
    await register(redis, keys, state=ReplicaState.COMBINED, infer_batch_max=1)
    await offer(redis, keys, *(request(f"q{n}") for n in range(9)))
    async with dispatcher(redis, stop_s=0.1):
        await eventually(lambda: _events(redis, keys, StateChanged))
    (event,) = await _events(redis, keys, StateChanged)
    assert isinstance(event, StateChanged)
    assert (event.before, event.after) == (ReplicaState.COMBINED, ReplicaState.SERVING)
    assert event.reason.startswith("recall")


async def test_a_release_says_what_is_expected_of_the_request(redis: Redis, keys: Keys) -> None:
    """A prediction that is made and does not travel: it can never be compared with what came of it."""
    await register(redis, keys)
    await latency.save(redis, keys, "r1", LatencyModel(infer=Line(base_s=0.01, per_sequence_s=0.001)))
    await offer(redis, keys, request())
    async with dispatcher(redis):
        await eventually(lambda: _moved(redis, keys))
    (entry,) = streams.parse("", await redis.xrange(keys.subflow("r1")))
    expected = msgspec.json.decode(entry.note, type=Expected)
    assert [expected.first_s, expected.token_s] == pytest.approx([0.011, 0.011])


async def test_lengths_are_learned_from_the_answers(redis: Redis, keys: Keys) -> None:
    """A stream whose long answers nobody notices: its batch is made for the length that the fit was told."""
    await latency.save(redis, keys, "r1", LatencyModel(infer=Line(base_s=0.001), output_tokens=2))
    async with replica(redis, keys), dispatcher(redis) as running:
        await offer(redis, keys, *_many(20, 8))

        def learned() -> bool:
            term = running.leaders["m"].term if "m" in running.leaders else None
            stream = term.streams.of(ORIGINAL) if term is not None else None
            return stream is not None and stream.shape(0.0, 2.0).output_tokens == pytest.approx(8, rel=0.05)

        await eventually(learned)


async def test_a_flood_of_one_tenant_does_not_hold_up_another(redis: Redis, keys: Keys) -> None:
    """Fairness that is computed for tenants which are lost on the way."""
    await register(redis, keys)
    flood = [request(f"f{n}", tenant="flood", deadline_s=4e9) for n in range(60)]
    await offer(redis, keys, *flood, *(request(f"s{n}", tenant="small", deadline_s=5e9) for n in range(4)))
    async with replica(redis, keys), dispatcher(redis):

        async def done() -> bool:
            return len(await finished(redis, keys)) == 64

        await eventually(done)
    order = [reply.id for reply in await replies(redis, keys) if isinstance(reply, Done)]
    assert max(order.index(f"s{n}") for n in range(4)) < 60
