"""The coordinator against a real broker: jobs start, samples become batch sizes, and one of two leads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import msgspec
import pytest
from redis.asyncio import Redis

from collm_common import latency, messages, streams
from collm_common.clock import SystemClock
from collm_common.errors import CollmError
from collm_common.keys import Keys
from collm_common.messages import (
    AnyMessage,
    Configure,
    InferenceReport,
    Iteration,
    JobChanged,
    ReplicaChanged,
    Served,
    TrainReport,
    UpdateUploaded,
)
from collm_common.registry import Registry
from collm_common.settings import load
from collm_common.types import BatchSizes, ReplicaInfo, ReplicaState, Slo
from collm_coordinator.replica_model import ReplicaModel
from collm_coordinator.service import Coordinator
from collm_coordinator.settings import CoordinatorSettings
from tests.support.waiting import eventually

SLO = Slo("s", e2e_s=2.0)


@asynccontextmanager
async def running(redis: Redis, **changes: object) -> AsyncIterator[Coordinator]:
    settings = CoordinatorSettings(**{"slo": SLO, "fit_s": 0.05, "lease_ttl_s": 0.6, **changes})  # type: ignore[arg-type]
    coordinator = Coordinator(settings, redis, SystemClock())
    task = asyncio.create_task(coordinator.run())
    try:
        await eventually(lambda: task.done() or coordinator.leads)
        yield coordinator
    finally:
        coordinator.stop.set()
        await asyncio.wait_for(task, 20)


async def register(redis: Redis, keys: Keys, state: ReplicaState, *ids: str) -> None:
    for id_ in ids:
        info = ReplicaInfo(id_, "m", "i", state, ready=True, infer_batch_max=16, context_tokens=64)
        await Registry(redis, keys).register(info, 60)


async def say(redis: Redis, key: str, message: AnyMessage) -> None:
    await streams.append(redis, key, messages.kind(message), "test", messages.encode(message))


async def form(redis: Redis, keys: Keys, *clients: str) -> None:
    await redis.hset(keys.job("j"), mapping={"status": "forming", "clients": ",".join(clients)})
    await redis.sadd(keys.jobs, "j")
    await say(redis, keys.events, JobChanged(job="j", status="forming", round=0, reason="test", time_s=1.0))


def inference(state: ReplicaState, *cells: tuple[int, int, float]) -> InferenceReport:
    return InferenceReport(
        replica="r1",
        state=state,
        time_s=1.0,
        utilisation=0.5,
        memory_bytes=1,
        queue=0,
        running=1,
        mean_batch=1.0,
        limit=16,
        train_batch=0,
        iterations=tuple(Iteration(BatchSizes(t, i), 5, s) for t, i, s in cells),
        output_tokens=200,
        finished=10,
    )


def training(train: int, infer: int, step_s: float) -> TrainReport:
    return TrainReport(
        replica="r1",
        job="j",
        round=1,
        step=1,
        time_s=1.0,
        sizes=BatchSizes(train, infer),
        step_s=step_s,
        samples=train,
        loss=1.0,
        noise_scale=50.0,
    )


async def train_a_round(redis: Redis, keys: Keys, base_s: float, per_sample_s: float) -> None:
    """Micro-steps at six (B, b) and the update that ends them."""
    for train in (1, 2, 4):
        for infer in (1, 4):
            await say(redis, keys.telemetry, training(train, infer, base_s + per_sample_s * train))
    event = UpdateUploaded(job="j", round=1, replica="r1", samples=9, loss=1.0, loss_last=1.0, time_s=1.0)
    await say(redis, keys.events, event)


async def states(redis: Redis, keys: Keys) -> dict[str, ReplicaState]:
    return {id_: info.state for id_, info in (await Registry(redis, keys).replicas()).items()}


async def commands(redis: Redis, keys: Keys, replica: str) -> list[BatchSizes]:
    entries = streams.parse("", await redis.xrange(keys.control(replica)))
    found = [messages.decode(entry.data) for entry in entries]
    return [message.sizes for message in found if isinstance(message, Configure)]


async def test_a_job_that_forms_gets_its_clients_combined_with_first_sizes(redis: Redis, keys: Keys) -> None:
    """A job that waits for its clients, or clients that are taken though they serve again."""
    await register(redis, keys, ReplicaState.IDLE, "r1", "r2")
    await register(redis, keys, ReplicaState.SERVING, "r3")
    async with running(redis):
        await form(redis, keys, "r1", "r2", "r3", "r9")
        await eventually(partial(_states_are, redis, keys, ["combined", "combined", "serving"]))
        for id_ in ("r1", "r2"):
            (drawn,) = await commands(redis, keys, id_)
            assert drawn == await latency.load_sizes(redis, keys, id_)
            assert drawn.train >= 1
            assert drawn.infer >= 8
    assert await commands(redis, keys, "r3") == []


async def test_a_job_that_began_while_nobody_led_is_found(redis: Redis, keys: Keys) -> None:
    """An event that nobody heard."""
    await register(redis, keys, ReplicaState.IDLE, "r1")
    await form(redis, keys, "r1")
    async with running(redis):
        await eventually(partial(_states_are, redis, keys, ["combined"]))


async def test_a_job_whose_event_was_damaged_is_found(redis: Redis, keys: Keys) -> None:
    """A job that waits for ever for one lost message."""
    await register(redis, keys, ReplicaState.IDLE, "r1")
    async with running(redis):
        await redis.xadd(keys.events, streams.fields("job_changed", "j", b"garbage"))
        await redis.hset(keys.job("j"), mapping={"status": "forming", "clients": "r1"})
        await redis.sadd(keys.jobs, "j")
        await eventually(partial(_states_are, redis, keys, ["combined"]))


async def test_damaged_sizes_are_replaced_by_the_next_choice(redis: Redis, keys: Keys) -> None:
    """A value edited by hand that ends the coordinator whenever it looks at it."""
    await register(redis, keys, ReplicaState.COMBINED, "r1")
    await redis.hset(keys.config("r1"), mapping={"train": "many", "infer": "1"})
    cells = [(train, infer, 0.02 + 0.01 * (infer + train)) for train in (0, 1, 2) for infer in (1, 2, 4)]
    async with running(redis, min_infer_share=0.0):
        await say(redis, keys.telemetry, inference(ReplicaState.COMBINED, *cells))
        for train in (1, 2, 4):
            await say(redis, keys.telemetry, training(train, 4, 0.5 + 0.1 * train))
        await eventually(partial(_was_told_something, redis, keys))
        chosen = await latency.load_sizes(redis, keys, "r1")
        assert chosen is not None
        assert chosen.train + chosen.infer <= 8


async def test_clients_of_a_job_begin_with_different_sm_shares(redis: Redis, keys: Keys) -> None:
    """A share that nobody ever tries, so that no law for it can be fitted."""
    await register(redis, keys, ReplicaState.IDLE, "r1", "r2")
    async with running(redis) as coordinator:
        coordinator.models |= {id_: ReplicaModel(shares=(1.0, 0.3)) for id_ in ("r1", "r2")}
        await form(redis, keys, "r1", "r2")
        await eventually(partial(_states_are, redis, keys, ["combined", "combined"]))
    chosen = [await latency.load_sizes(redis, keys, id_) for id_ in ("r1", "r2")]
    assert [sizes.sm_share for sizes in chosen if sizes is not None] == [0.3, 1.0]


async def test_samples_become_a_model_and_batch_sizes_that_keep_the_slo(redis: Redis, keys: Keys) -> None:
    """Telemetry that changes nothing, or sizes that break the SLO which they were chosen for.

    20 tokens within 2 s allow 100 ms a step: with T = 20 ms + 10 ms b + 10 ms B, that is b + B <= 8.
    """
    await register(redis, keys, ReplicaState.COMBINED, "r1")
    cells = [(train, infer, 0.02 + 0.01 * infer + 0.01 * train) for train in (0, 1, 2, 4) for infer in (1, 2, 4)]
    async with running(redis, min_infer_share=0.0):
        await say(redis, keys.telemetry, inference(ReplicaState.COMBINED, *cells))
        await train_a_round(redis, keys, 0.5, 0.1)
        await eventually(partial(_sizes_are, redis, keys, lambda sizes: sizes.train >= 4))
        model = await latency.load(redis, keys, "r1")
        assert model is not None
        assert model.iteration_s(4, 4) == pytest.approx(0.10, rel=0.05)
        assert model.output_tokens == 20
        sizes = await latency.load_sizes(redis, keys, "r1")
        assert sizes is not None
        assert sizes.train + sizes.infer <= 8
        assert sizes in await commands(redis, keys, "r1")
        reason = await redis.hget(keys.config("r1"), "reason")
        assert b"goodput" in reason


async def test_fixed_sizes_are_kept_whatever_is_measured(redis: Redis, keys: Keys) -> None:
    """An operator's sizes that hold until the first fit, or that are probed away."""
    await register(redis, keys, ReplicaState.IDLE, "r1")
    fixed = BatchSizes(6, 3)
    async with running(redis, fixed=fixed, max_train_batch=16) as coordinator:
        await form(redis, keys, "r1")
        await eventually(lambda: _sizes(redis, keys, "r1", fixed))
        for cells in (((0, 1, 0.010), (0, 4, 0.013)), ((1, 1, 0.012), (4, 4, 0.021)), ((2, 1, 0.014), (2, 4, 0.017))):
            await say(redis, keys.telemetry, inference(ReplicaState.COMBINED, *cells))
        await train_a_round(redis, keys, 0.05, 0.001)
        await eventually(lambda: _trains(coordinator))
        assert await _sizes(redis, keys, "r1", fixed)
        assert set(await commands(redis, keys, "r1")) == {fixed}


async def _sizes(redis: Redis, keys: Keys, replica: str, wanted: BatchSizes) -> bool:
    return (await latency.sizes_of(redis, keys, [replica])).get(replica) == wanted


def _trains(coordinator: Coordinator) -> bool:
    law = coordinator.models["r1"].latency
    return law is not None and law.train is not None


@pytest.mark.parametrize(("accumulation", "larger"), [("1", True), ("64", False), ("many", True)])
async def test_accumulation_is_what_the_job_says(redis: Redis, keys: Keys, accumulation: str, larger: bool) -> None:
    """An efficiency of the micro-batch where the optimiser sees 64 of them: batches that are much too large.

    With p = 50, M = B is worth its size up to 8, while of M = 64 B every further sample is worth next to nothing.
    """
    await register(redis, keys, ReplicaState.COMBINED, "r1")
    await Registry(redis, keys).update("r1", job="j")
    await redis.hset(keys.job("j"), "accumulation", accumulation)
    cells = [(train, infer, 0.02 + 0.001 * (infer + train)) for train in (0, 1, 2, 4) for infer in (1, 2, 4)]
    async with running(redis, min_infer_share=0.0):
        await say(redis, keys.telemetry, inference(ReplicaState.COMBINED, *cells))
        await train_a_round(redis, keys, 0.2, 0.2)
        await eventually(partial(_sizes_are, redis, keys, lambda sizes: (sizes.train > 1) is larger))


async def test_a_serving_replica_is_fitted_without_touching_its_sizes(redis: Redis, keys: Keys) -> None:
    """A dispatcher without a latency model for the replicas that only serve."""
    await register(redis, keys, ReplicaState.SERVING, "r1")
    async with running(redis):
        await redis.xadd(keys.telemetry, streams.fields("inference_report", "x", b"garbage"))
        await say(redis, keys.telemetry, inference(ReplicaState.SERVING, (0, 1, 0.02), (0, 4, 0.03), (0, 8, 0.05)))
        await eventually(partial(latency.load, redis, keys, "r1"))
    assert await latency.load_sizes(redis, keys, "r1") is None


async def test_too_few_samples_change_nothing(redis: Redis, keys: Keys) -> None:
    """A configuration made of one measurement."""
    await register(redis, keys, ReplicaState.COMBINED, "r1")
    async with running(redis) as coordinator:
        await say(redis, keys.telemetry, inference(ReplicaState.COMBINED, (1, 1, 9.0)))
        await eventually(lambda: coordinator.models.get("r1") and coordinator.models["r1"].fitted == 1)
    assert await latency.load(redis, keys, "r1") is None
    assert await latency.load_sizes(redis, keys, "r1") is None


async def test_a_replica_that_serves_again_gets_its_whole_batch_back(redis: Redis, keys: Keys) -> None:
    """A cap from training that stays after it."""
    await register(redis, keys, ReplicaState.COMBINED, "r1")
    await latency.save_sizes(redis, keys, "r1", BatchSizes(4, 2), "test")
    async with running(redis):
        await Registry(redis, keys).transition("r1", ReplicaState.COMBINED, ReplicaState.SERVING, "recalled", 1.0)
        await eventually(partial(_was_told_something, redis, keys))
        assert await commands(redis, keys, "r1") == [BatchSizes(0, 16)]


async def test_a_cap_left_behind_while_nobody_led_is_lifted(redis: Redis, keys: Keys) -> None:
    """A replica that serves at a fraction of its batch for ever."""
    await register(redis, keys, ReplicaState.SERVING, "r1")
    await latency.save_sizes(redis, keys, "r1", BatchSizes(4, 2), "test")
    async with running(redis):
        await eventually(partial(_sizes_are, redis, keys, BatchSizes(0, 16).__eq__))


async def test_a_new_process_is_told_its_sizes_again(redis: Redis, keys: Keys) -> None:
    """A restarted engine that runs beside training without a cap."""
    await register(redis, keys, ReplicaState.COMBINED, "r1")
    await latency.save_sizes(redis, keys, "r1", BatchSizes(4, 2), "test")
    async with running(redis):
        await say(redis, keys.events, ReplicaChanged(replica="r1", what="up", reason="test", time_s=1.0))
        await eventually(partial(_was_told, redis, keys, BatchSizes(4, 2)))


async def test_sizes_change_inside_a_round_only_when_they_break_the_slo(redis: Redis, keys: Keys) -> None:
    """Batch sizes that wobble with every sample, or that stay when requests are already late."""
    await register(redis, keys, ReplicaState.COMBINED, "r1")
    kept = BatchSizes(1, 4)
    await latency.save_sizes(redis, keys, "r1", kept, "test")
    async with running(redis, min_infer_share=0.0):
        for train in (1, 2, 4):
            await say(redis, keys.telemetry, training(train, 4, 0.5 + 0.1 * train))
        fast = [(train, infer, 0.02 + 0.001 * (infer + train)) for train in (0, 1, 2) for infer in (1, 2, 4)]
        await say(redis, keys.telemetry, inference(ReplicaState.COMBINED, *fast))
        await eventually(partial(latency.load, redis, keys, "r1"))
        assert await latency.load_sizes(redis, keys, "r1") == kept
        slow = [(train, infer, 0.02 + 0.03 * (infer + train)) for train, infer, _ in fast]
        for _ in range(40):
            await say(redis, keys.telemetry, inference(ReplicaState.COMBINED, *slow))
        await eventually(partial(_sizes_are, redis, keys, lambda sizes: sizes != kept))
        chosen = await latency.load_sizes(redis, keys, "r1")
        assert chosen is not None
        assert chosen.train + chosen.infer < 5


async def test_danger_to_the_slo_is_answered_with_the_report_that_shows_it(redis: Redis, keys: Keys) -> None:
    """Requests that are late until the next fit, or the next round, comes."""
    await register(redis, keys, ReplicaState.COMBINED, "r1")
    kept = BatchSizes(4, 4)
    async with running(redis, min_infer_share=0.0, probe_steps=0) as coordinator:
        await latency.save_sizes(redis, keys, "r1", kept, "test")
        for train in (1, 2, 4):
            await say(redis, keys.telemetry, training(train, 4, 0.5 + 0.1 * train))
        fast = [(train, infer, 0.02 + 0.001 * (infer + train)) for train in (0, 1, 2, 4) for infer in (1, 2, 4)]
        await say(redis, keys.telemetry, inference(ReplicaState.COMBINED, *fast))
        await eventually(partial(latency.load, redis, keys, "r1"))
    async with running(redis, min_infer_share=0.0, probe_steps=0, fit_s=3600.0) as second:
        second.models = coordinator.models
        await say(redis, keys.telemetry, inference(ReplicaState.COMBINED, (4, 4, 0.2)))
        await eventually(partial(_sizes_are, redis, keys, lambda sizes: sizes != kept))
        assert b"danger" in await redis.hget(keys.config("r1"), "reason")
        assert second.metrics.registry.get_sample_value("collm:slo_dangers_total", {"replica": "r1"}) == 1


async def test_the_batch_is_probed_in_the_first_round_by_all_clients_together(redis: Redis, keys: Keys) -> None:
    """One (B, b) a replica and round: slopes that no fit can tell, for as long as the job takes."""
    await register(redis, keys, ReplicaState.COMBINED, "r1")
    await redis.sadd(keys.jobs, "j")
    async with running(redis, fit_s=3600.0) as coordinator:
        await latency.save_sizes(redis, keys, "r1", BatchSizes(1, 8), "test")
        ran = [1]
        while len(ran) < 4:
            cells = [(ran[-1], infer, 0.001 * (infer + ran[-1])) for infer in (1, 2)]
            await say(redis, keys.telemetry, inference(ReplicaState.COMBINED, *cells))
            for _ in range(coordinator.settings.probe_steps):
                await say(redis, keys.telemetry, training(ran[-1], 8, 0.1 * ran[-1]))
            await eventually(partial(_sizes_are, redis, keys, lambda sizes: sizes.train not in ran))
            sizes = await latency.load_sizes(redis, keys, "r1")
            assert sizes is not None
            assert sizes.infer == 8, "b is left to the requests"
            ran.append(sizes.train)
    assert ran == [1, 2, 4, 8]
    assert b"probe" in await redis.hget(keys.config("r1"), "reason")


async def test_objectives_of_the_requests_bind_beside_the_configured_one(redis: Redis, keys: Keys) -> None:
    """Sizes for the one SLO that the coordinator was started with, while the requests ask for another."""
    await register(redis, keys, ReplicaState.COMBINED, "r1")
    cells = [(train, infer, 0.02 + 0.01 * infer + 0.01 * train) for train in (0, 1, 2, 4) for infer in (1, 2, 4)]
    tight = Served(Slo("tight", tpot_s=0.065), 10)
    async with running(redis, min_infer_share=0.0, probe_steps=0):
        report = inference(ReplicaState.COMBINED, *cells)
        await say(redis, keys.telemetry, msgspec.structs.replace(report, served=(tight,)))
        await train_a_round(redis, keys, 0.5, 0.1)
        await eventually(partial(_sizes_are, redis, keys, lambda sizes: sizes.train + sizes.infer == 4))


async def test_predicted_and_measured_are_metrics(redis: Redis, keys: Keys) -> None:
    """A law that is wrong, and nobody sees it."""
    await register(redis, keys, ReplicaState.SERVING, "r1")
    async with running(redis) as coordinator:
        cells = [(0, infer, 0.01 * infer) for infer in (1, 2, 4)]
        await say(redis, keys.telemetry, inference(ReplicaState.SERVING, *cells))
        await eventually(partial(latency.load, redis, keys, "r1"))
        await say(redis, keys.telemetry, inference(ReplicaState.SERVING, (0, 8, 0.088)))
        read, labels = coordinator.metrics.registry.get_sample_value, {"replica": "r1", "part": "alone"}
        await eventually(lambda: read("collm:latency_measured_seconds", labels) == 0.088)
        assert read("collm:latency_predicted_seconds", labels) == pytest.approx(0.08, rel=0.01)
        assert read("collm:latency_fit_r2", labels) == pytest.approx(1)
        await Registry(redis, keys).remove("r1", "test", 1.0)
        await eventually(lambda: read("collm:latency_measured_seconds", labels) is None)


async def test_one_of_two_leads_and_the_other_takes_over(redis: Redis, keys: Keys) -> None:
    """Two coordinators that configure against each other, or none after the first is gone."""
    await register(redis, keys, ReplicaState.IDLE, "r1")
    settings = CoordinatorSettings(slo=SLO, fit_s=0.05, lease_ttl_s=0.6)
    second = Coordinator(settings, redis, SystemClock())
    async with running(redis) as first:
        task = asyncio.create_task(second.run())
        await form(redis, keys, "r1")
        await eventually(partial(_states_are, redis, keys, ["combined"]))
        assert len(await commands(redis, keys, "r1")) == 1
        assert first.leads
        assert not second.leads
    await eventually(lambda: second.leads)
    second.stop.set()
    await asyncio.wait_for(task, 20)


async def test_replicas_that_left_are_forgotten(redis: Redis, keys: Keys) -> None:
    """Memory that grows with every replica that ever was."""
    await register(redis, keys, ReplicaState.SERVING, "r1")
    async with running(redis) as coordinator:
        await say(redis, keys.telemetry, inference(ReplicaState.SERVING, (0, 1, 0.02)))
        await eventually(lambda: "r1" in coordinator.models)
        await Registry(redis, keys).remove("r1", "test", 1.0)
        await eventually(lambda: "r1" not in coordinator.models)


def test_a_bad_setting_is_named() -> None:
    """A coordinator that starts with another SLO than its operator wrote."""
    with pytest.raises(CollmError, match="COLLM_COORDINATOR_SLO"):
        load(CoordinatorSettings, "coordinator", {"COLLM_COORDINATOR_SLO": '{"name": "x", "e2e": 1}'})


async def _states_are(redis: Redis, keys: Keys, expected: list[str]) -> bool:
    return [state.value for state in (await states(redis, keys)).values()] == expected


async def _sizes_are(redis: Redis, keys: Keys, as_wanted: Callable[[BatchSizes], bool]) -> bool:
    sizes = await latency.load_sizes(redis, keys, "r1")
    return sizes is not None and as_wanted(sizes)


async def _was_told(redis: Redis, keys: Keys, expected: BatchSizes) -> bool:
    return expected in await commands(redis, keys, "r1")


async def _was_told_something(redis: Redis, keys: Keys) -> bool:
    return bool(await commands(redis, keys, "r1"))
