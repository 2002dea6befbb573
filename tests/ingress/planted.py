"""A cell as it is after a federated round under load, written into a broker by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

from redis.asyncio import Redis

from collm_common import latency, messages, post
from collm_common.keys import Keys
from collm_common.latency import LatencyModel, Line
from collm_common.messages import (
    AdapterPublished,
    Aggregated,
    Evaluated,
    Event,
    InferenceReport,
    Iteration,
    JobChanged,
    ReplicaChanged,
    StateChanged,
    TrainReport,
    UpdateUploaded,
)
from collm_common.registry import Registry
from collm_common.streams import append
from collm_common.types import BatchSizes, Quality, ReplicaInfo, ReplicaState

REPLICAS = ("r1", "r2", "r3")
SERVING, IDLE, COMBINED = ReplicaState.SERVING, ReplicaState.IDLE, ReplicaState.COMBINED
ALONE = Line(base_s=0.02, per_sequence_s=0.004, r2=0.96, n=40, sequence_identified=True)
BESIDE = Line(0.03, 0.006, 0.012, r2=0.91, n=60, sequence_identified=True, train_identified=True)
MODEL = LatencyModel(infer=BESIDE, train=Line(0.05, 0.002, 0.06, r2=0.9, n=40), alone=ALONE, output_tokens=32)
REPORTS = 120


async def plant(redis: Redis, keys: Keys, now_s: float) -> None:
    """Two live replicas that train, a dead one, two streams, an adapter at version 2, a job in round 2."""
    registry = Registry(redis, keys)
    for id_ in REPLICAS:
        await registry.register(_info(id_), 60)
        await latency.save(redis, keys, id_, MODEL)
        await latency.save_sizes(redis, keys, id_, BatchSizes(train=2, infer=4), "planted")
    await redis.delete(keys.lease("r3"))
    async with redis.pipeline(transaction=False) as pipe:
        for report in _reports(now_s):
            pipe.xadd(keys.telemetry, _entry(report))
        await pipe.execute()
    for event in events(now_s):
        await post.event(redis, keys, event, "planted")
    await redis.sadd(keys.streams, "m|default", "m|chat")
    for key in (keys.requests("m", "chat"), keys.requests("m", "chat"), keys.subflow("r1")):
        await append(redis, key, "planted", "x", b"")
    await redis.hset(keys.adapter("desk"), mapping={"model": "m", "version": "2"})
    await redis.hset(keys.job("j1"), mapping={"adapter": "desk"})
    await redis.sadd(keys.adapters, "desk")


def events(now_s: float) -> list[Event]:
    """Oldest first: replicas come, fall idle, train a round and a half; one dies."""
    found: list[Event] = [
        ReplicaChanged(replica=id_, what="up", reason="ready", time_s=now_s - 800) for id_ in REPLICAS
    ]
    for number, id_ in enumerate(REPLICAS):
        found.append(_moved(id_, SERVING, IDLE, "low load", now_s - 420 + 20 * number))
    found.append(JobChanged(job="j1", status="forming", round=0, reason="3 idle replicas", time_s=now_s - 370))
    found += [_moved(id_, IDLE, COMBINED, "job j1 starts", now_s - 365) for id_ in REPLICAS]
    found.append(JobChanged(job="j1", status="training", round=1, reason="all clients joined", time_s=now_s - 360))
    found += _round(1, now_s - 240, 3.9, 4.8, 3.1)
    found.append(JobChanged(job="j1", status="training", round=2, reason="round 1 accepted", time_s=now_s - 230))
    found += _round(2, now_s - 110, 2.9, 3.1, 2.4)
    found.append(JobChanged(job="j1", status="training", round=3, reason="round 2 accepted", time_s=now_s - 100))
    found.append(ReplicaChanged(replica="r3", what="down", reason="its lease ran out", time_s=now_s - 40))
    return found


def _round(number: int, at_s: float, loss: float, before: float, after: float) -> list[Event]:
    found: list[Event] = [
        UpdateUploaded(
            job="j1", round=number, replica=id_, samples=16, loss=loss + 0.1 * extra, loss_last=loss, time_s=at_s
        )
        for extra, id_ in enumerate(REPLICAS)
    ]
    found.append(Aggregated(job="j1", round=number, adapter="desk", version=number, residual=0.0, time_s=at_s + 2))
    found += [
        Evaluated(
            job="j1",
            round=number,
            replica=id_,
            adapter="desk",
            version=number,
            quality=Quality(after, 100),
            time_s=at_s + 5,
        )
        for id_ in REPLICAS
    ]
    return [*found, AdapterPublished(name="desk", version=number, before=before, after=after, time_s=at_s + 6)]


def _reports(now_s: float) -> Iterator[InferenceReport | TrainReport]:
    for step in range(REPORTS):
        at_s = now_s - (REPORTS - step) * 2
        for number, id_ in enumerate(REPLICAS):
            if id_ == "r3" and at_s > now_s - 40:
                continue
            wave = 0.5 + 0.4 * math.sin(step / 9 + number)
            running = 1 + round(3 * wave)
            yield _report(id_, at_s, wave, running, step)
            if step % 4 == number:
                yield _step(id_, at_s, step, 2.3 + 2.6 * math.exp(-step / 40) + 0.15 * math.sin(step * (number + 2)))


def _report(id_: str, at_s: float, wave: float, running: int, step: int) -> InferenceReport:
    sizes = BatchSizes(train=2 if step % 3 else 0, infer=running)
    noise = 1 + 0.06 * math.sin(step * 7)
    return InferenceReport(
        replica=id_,
        state=COMBINED,
        time_s=at_s,
        utilisation=wave,
        memory_bytes=700 << 20,
        queue=0,
        running=running,
        mean_batch=3 * wave + 0.4,
        limit=4,
        train_batch=2,
        iterations=(Iteration(sizes, 20, MODEL.iteration_s(sizes.train, sizes.infer) * noise),),
        output_tokens=round(40 * wave),
        versions={"desk": "2.4" if id_ == "r1" else "2"},
    )


def _step(id_: str, at_s: float, step: int, loss: float) -> TrainReport:
    sizes = BatchSizes(train=2, infer=4)
    return TrainReport(
        replica=id_,
        job="j1",
        round=1 + step // 60,
        step=step + 1,
        time_s=at_s,
        sizes=sizes,
        step_s=0.2,
        samples=2,
        loss=loss,
    )


def _info(id_: str) -> ReplicaInfo:
    return ReplicaInfo(
        id=id_, model="m", incarnation="i", state=COMBINED, ready=True, infer_batch_max=8, context_tokens=256, job="j1"
    )


def _moved(id_: str, before: ReplicaState, after: ReplicaState, reason: str, at_s: float) -> StateChanged:
    return StateChanged(replica=id_, before=before, after=after, reason=reason, time_s=at_s)


def _entry(message: InferenceReport | TrainReport) -> dict[str | bytes, str | bytes]:
    return {"kind": messages.kind(message), "id": message.replica, "data": messages.encode(message)}
