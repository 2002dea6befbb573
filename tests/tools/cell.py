"""What a demo leaves behind, made by hand: events, reports, records; and an HTTP service that answers with quality."""

from __future__ import annotations

import json
from typing import Any

from aiohttp import web

from collm_common.messages import (
    AdapterPublished,
    Aggregated,
    Event,
    InferenceReport,
    JobChanged,
    ReplicaChanged,
    StateChanged,
    TrainReport,
    UpdateUploaded,
)
from collm_common.types import BatchSizes, ReplicaInfo, ReplicaState
from collm_tools.load.client import RequestRecord

REPLICAS = ("r1", "r2", "r3")
STATES = (ReplicaState.SERVING, ReplicaState.IDLE, ReplicaState.COMBINED, ReplicaState.SERVING)


def report(replica: str, time_s: float, state: ReplicaState = ReplicaState.SERVING, **changes: Any) -> InferenceReport:
    fields: dict[str, Any] = {
        "utilisation": 0.5,
        "memory_bytes": 1,
        "queue": 0,
        "running": 2,
        "mean_batch": 1.5,
        "limit": 4,
        "train_batch": 2,
        "output_tokens": 20,
        "versions": {"desk": "2"},
    }
    return InferenceReport(replica=replica, state=state, time_s=time_s, **(fields | changes))


def reports(start_s: float = 0.0) -> list[InferenceReport]:
    """Three replicas that each take in three snapshots and two versions."""
    return [
        report(replica, start_s + 10.0 * step, state, snapshots=step, published=min(step, 2))
        for replica in REPLICAS
        for step, state in enumerate(STATES)
    ]


def training(start_s: float = 0.0) -> list[TrainReport]:
    sizes = BatchSizes(train=2, infer=4)
    return [
        TrainReport(
            replica="r1",
            job="j1",
            round=1,
            step=n + 1,
            time_s=start_s + n,
            sizes=sizes,
            step_s=0.5,
            samples=2,
            loss=3 / (n + 1),
        )
        for n in range(5)
    ]


def events(start_s: float = 0.0) -> list[Event]:
    """One job of two rounds."""
    found: list[Event] = [
        ReplicaChanged(replica="r1", what="up", reason="ready", time_s=start_s),
        StateChanged(
            replica="r1", before=ReplicaState.SERVING, after=ReplicaState.IDLE, reason="quiet", time_s=start_s + 1
        ),
        JobChanged(job="j1", status="running", round=1, reason="three idle", time_s=start_s + 2),
    ]
    for round_ in (1, 2):
        at_s = start_s + 10 * round_
        found += [
            UpdateUploaded(job="j1", round=round_, replica=r, samples=8, loss=2, loss_last=1, time_s=at_s)
            for r in REPLICAS
        ]
        found.append(Aggregated(job="j1", round=round_, adapter="desk", version=round_, residual=0.0, time_s=at_s))
        found.append(AdapterPublished(name="desk", version=round_, before=3.0, after=3.0 - round_, time_s=at_s))
    return [*found, JobChanged(job="j1", status="succeeded", round=2, reason="done", time_s=start_s + 30)]


def record(at_s: float = 0.0, start_s: float = 0.0, ce: float | None = 2.0) -> RequestRecord:
    return RequestRecord(
        at_s=at_s,
        sent_s=start_s + at_s,
        outcome="completed",
        ttft_s=0.1,
        e2e_s=0.5,
        output_tokens=10,
        cross_entropy=ce,
        reference_tokens=5,
    )


def info(replica: str, **changes: Any) -> ReplicaInfo:
    fields: dict[str, Any] = {
        "model": "m",
        "incarnation": "i1",
        "state": ReplicaState.SERVING,
        "ready": True,
        "infer_batch_max": 8,
        "context_tokens": 64,
        "base_digest": "d",
    }
    return ReplicaInfo(id=replica, **(fields | changes))


class Service:
    """Ingress and data endpoint in one: answers get better with each one; `scores` off leaves the quality out."""

    def __init__(self, scores: bool = True) -> None:
        self.scores, self.answered = scores, 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_get("/digest", self.digest)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/ready", self.digest)
        return app

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.answered += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        last: dict[str, Any] = {"choices": [], "usage": {"completion_tokens": 4}}
        if self.scores:
            last["collm"] = {"adapter": "desk@v1", "cross_entropy": 4.0 / self.answered, "reference_tokens": 6}
        for chunk in ({"choices": [{"delta": {"content": "ok"}, "finish_reason": "stop"}]}, last):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def digest(self, _: web.Request) -> web.Response:
        return web.json_response({"digest": "d"})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(text='collm:slo_attainment{model="m"} 0.75\ncollm:requests_total 9\n')
