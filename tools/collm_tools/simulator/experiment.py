"""One simulated day of one system under one load: everything that the figures need of it."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from itertools import takewhile
from math import inf

from msgspec import Struct, structs

from collm_common.latency import LatencyModel
from collm_common.messages import Hyperparams
from collm_common.types import BatchSizes, Slo
from collm_launcher.policy.job import Rules
from collm_tools.simulator import lineup, offers
from collm_tools.simulator.cell import Cell
from collm_tools.simulator.coordinating import CoordinatorRules
from collm_tools.simulator.federation import Federation, Training
from collm_tools.simulator.hardware import Sharing, measured
from collm_tools.simulator.learning import Curve
from collm_tools.simulator.request import SimRequest
from collm_tools.simulator.scheduling import Watched
from collm_tools.simulator.tally import Figures, Tally
from collm_tools.simulator.timeline import Timeline
from collm_tools.simulator.workload import FULL_LOAD, SLICES, Workload, day, ideal_rate

ADAPTERS = 8
MOST = 64
FITS, ROUND_FITS, LEAST_FIT_S = 4, 40, 5.0
"""Fits of every replica a day, and at most so many at the ends of its rounds: each takes as long as thousands of
simulated requests."""


class Size(Struct, frozen=True):
    """`hasten` shortens training by as much as the day is shorter than ten hours: rounds, windows, learning curve.

    The run ends `until_s` into the day. The top level at scale 4 is that of so many `copies` of each trace laid over
    one another; without it, `FULL_LOAD` of what the replicas carry.
    """

    day_s: float
    replicas: int
    until_s: float = inf
    copies: float | None = None

    @property
    def offered_s(self) -> float:
        """How long requests come."""
        return min(self.day_s, self.until_s)

    @property
    def hasten(self) -> float:
        """How much faster training goes than at full scale."""
        return 36000.0 / self.day_s


class System(Struct, frozen=True):
    """Who dispatches, and how training goes on beside: None for not at all; `pair` fixes (B, b)."""

    name: str
    dispatcher: lineup.Name
    trains: bool = False
    sharing: Sharing = "60"
    pair: BatchSizes | None = None
    apart: bool = False
    snapshots: bool = True
    learning: float = 1.0


COLLM = System("CoLLM", "collm", trains=True)
DLORA = System("dLoRA", "dlora")
SHEPHERD = System("Shepherd", "shepherd")
PEFT = System("PEFT", "round-robin")


class Result(Struct, frozen=True):
    """`by_load` has each workload apart. Shares are of all replica seconds; `reached` is (s, cross-entropy).

    `policy_s` is the CPU time that the live policies of all three services took, `cpu_s` that of the whole run.
    """

    system: str
    scale: float
    seed: int
    figures: Figures
    by_load: dict[str, Figures]
    activity: list[float]
    memory: list[float]
    combined: list[int]
    running: list[list[int]]
    good_per_bin: list[float]
    offered_per_bin: list[float]
    qualities: dict[int, int]
    replica_s: float
    inference_share: float
    training_share: float
    jobs: int
    reached: list[tuple[float, float]]
    policy_s: float = 0.0
    cpu_s: float = 0.0

    @property
    def overhead(self) -> float:
        """CPU time of the policies over the time that replicas worked."""
        worked = self.inference_share + self.training_share
        return self.policy_s / max(1e-9, worked * self.replica_s)


def requests(loads: Sequence[Workload], size: Size, scale: float, seed: int, spread: float) -> Iterator[SimRequest]:
    """The day's requests of all workloads, each with its even part of the capacity."""
    streams = []
    for index, load in enumerate(loads):
        hardware = measured(context_tokens=load.mean_context)
        full = ideal_rate(hardware, load, MOST) * size.replicas / len(loads) * FULL_LOAD
        if size.copies is not None:
            full = size.copies * load.rate
        arrivals = takewhile(lambda arrival: arrival.at_s < size.until_s, day(load, full * scale / 4, size.day_s, seed))
        streams.append(offers.offers(arrivals, load.slo, ADAPTERS, seed + 1000 * index, spread=spread))
    for number, request in enumerate(heapq.merge(*streams, key=lambda request: request.arrival_s)):
        request.number = number
        yield request


def training(size: Size, system: System, seed: int) -> Training:
    """The live rules at this size."""
    fast, full = size.hasten, Training()
    hyper = Hyperparams(accumulation=8, snapshot_steps=5)
    return structs.replace(
        full,
        rules=Rules(rounds=6, steps=max(2, round(50 / fast)), train_s=3600.0 / fast, form_s=60.0, hyper=hyper),
        tick_s=max(0.5, full.tick_s / fast),
        fit_s=size.offered_s / FITS,
        cooldown_s=full.cooldown_s / fast,
        aggregate_s=full.aggregate_s / fast,
        evaluate_s=full.evaluate_s / fast,
        load_s=full.load_s / fast,
        curve=Curve(scale=Curve().scale * size.replicas / 16 / fast * system.learning),
        apart=system.apart,
        snapshots=system.snapshots,
        seed=seed,
    )


def run(system: System, loads: Sequence[Workload], size: Size, scale: float, seed: int) -> Result:
    """The whole day."""
    began_s = time.process_time()
    context_tokens = sum(load.mean_context for load in loads) / len(loads)
    hardware = measured(system.sharing if system.trains else "30", context_tokens=context_tokens)
    replicas = lineup.cell(system.dispatcher, size.replicas, hardware, MOST)
    output_tokens = sum(load.mean_output for load in loads) / len(loads)
    latency: dict[str, LatencyModel] = {r.id: lineup.known(hardware, output_tokens) for r in replicas}
    slos: list[Slo] = [load.slo for load in loads]
    scheduler = Watched(lineup.scheduler(system.dispatcher, replicas, latency, ADAPTERS, seed))
    whole = Tally(bin_s=size.day_s / SLICES)
    one = len(loads) == 1
    tallies = {load.name: whole if one else Tally(bin_s=size.day_s / SLICES) for load in loads}

    def observe(request: SimRequest) -> None:
        whole(request)
        if not one:
            tallies[request.slo.name](request)

    cell = Cell(replicas, scheduler, observe)
    timeline = Timeline(replicas)
    cell.every(size.day_s / SLICES, timeline)
    rules = training(size, system, seed)
    federation = None
    for replica in replicas:
        replica.loss = rules.curve.start
    if system.trains:
        fit_s = max(LEAST_FIT_S, size.offered_s / ROUND_FITS)
        coordinator = CoordinatorRules(slos[-1], pair=system.pair, fit_s=fit_s, seed=seed)
        federation = Federation(cell, rules, coordinator, latency)
    cell.run(requests(loads, size, scale, seed, rules.curve.spread))
    seconds = cell.now * len(replicas)
    bins = [whole.bins.get(index) for index in range(SLICES)]
    return Result(
        system=system.name,
        scale=scale,
        seed=seed,
        figures=whole.figures(size.offered_s),
        by_load={name: tally.figures(size.offered_s) for name, tally in tallies.items()},
        activity=timeline.activity,
        memory=timeline.memory,
        combined=timeline.combined,
        running=timeline.running,
        good_per_bin=[(row.met if row else 0) / whole.bin_s for row in bins],
        offered_per_bin=[(row.offered if row else 0) / whole.bin_s for row in bins],
        qualities=whole.qualities,
        replica_s=seconds,
        inference_share=sum(replica.busy_s for replica in replicas) / seconds,
        training_share=sum(replica.train_s for replica in replicas) / seconds,
        jobs=federation.jobs if federation else 0,
        reached=federation.reached if federation else [(0.0, rules.curve.start)],
        policy_s=scheduler.spent_s + (federation.spent_s if federation else 0.0),
        cpu_s=time.process_time() - began_s,
    )
