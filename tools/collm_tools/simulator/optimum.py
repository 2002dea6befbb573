"""The live policy on instances that are small enough to solve exactly."""

from __future__ import annotations

import random

from msgspec import Struct

from collm_common.latency import LatencyModel, Line
from collm_common.types import Slo
from collm_tools.simulator.cell import Cell
from collm_tools.simulator.exact import Job, Server, best
from collm_tools.simulator.hardware import linear
from collm_tools.simulator.replica import Replica
from collm_tools.simulator.request import SimRequest
from collm_tools.simulator.subflows import Subflows

QUALITIES = (1.0, 1.5)
B = 3
TOKENS = 10
STEP_S, PER_SEQUENCE_S = 0.04, 0.01


class Instance(Struct, frozen=True):
    """Q-goodput, in requests weighed by quality: what the policy made online, and the most that could be made."""

    online: float
    optimum: float


def service_s(size: int) -> float:
    """A whole batch of `size`."""
    return TOKENS * (STEP_S + PER_SEQUENCE_S * size)


def solve(count: int, seed: int) -> Instance:
    """`count` requests within two seconds, two replicas that run a batch at a time, one of them of higher quality."""
    draw = random.Random(f"{count} {seed}")
    jobs = sorted(
        (Job(at_s := draw.uniform(0, 2.0), at_s + draw.uniform(0.5, 1.6)) for _ in range(count)),
        key=lambda job: job.arrival_s,
    )
    return Instance(_online(jobs), best(jobs, [Server(B, service_s, quality) for quality in QUALITIES]))


def _online(jobs: list[Job]) -> float:
    hardware = linear(STEP_S, PER_SEQUENCE_S, most=B)
    replicas = [Replica(f"r{n}", hardware, B, static=True) for n in range(len(QUALITIES))]
    for replica, quality in zip(replicas, QUALITIES, strict=True):
        replica.quality = quality
    model = LatencyModel(Line(STEP_S, PER_SEQUENCE_S), None, 0.0, TOKENS)
    ended: list[SimRequest] = []
    cell = Cell(replicas, Subflows(replicas, {r.id: model for r in replicas}), ended.append)
    cell.run(_request(number, job) for number, job in enumerate(jobs))
    worth = {replica.id: replica.quality for replica in replicas}
    return sum(worth[request.replica] for request in ended if request.met)


def _request(number: int, job: Job) -> SimRequest:
    slo = Slo("s", e2e_s=job.deadline_s - job.arrival_s, late="reject")
    return SimRequest(number, job.arrival_s, job.deadline_s, 1, TOKENS, slo, max_tokens=TOKENS, wanted_s=job.deadline_s)
