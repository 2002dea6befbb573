"""One simulated day of one system under one load: everything that the figures need of it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

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
from collm_tools.simulator.tally import Figures, Tally
from collm_tools.simulator.timeline import Timeline
from collm_tools.simulator.workload import FULL_LOAD, SLICES, Workload, day, ideal_rate

ADAPTERS = 8
MOST = 64
FITS = 4
"""Fits of a replica a day: each takes as long as thousands of simulated requests."""


class Size(Struct, frozen=True):
    """`hasten` shortens training by as much as the day is shorter than ten hours: rounds, windows, learning curve."""

    day_s: float
    replicas: int

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
    """`by_load` has each workload apart. Shares are of all replica seconds; `reached` is (s, cross-entropy)."""

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
    inference_share: float
    training_share: float
    jobs: int
    reached: list[tuple[float, float]]


def requests(loads: Sequence[Workload], size: Size, scale: float, seed: int, spread: float) -> Iterator[SimRequest]:
    """The day's requests of all workloads, each with its even part of the capacity."""
    hardware = measured()
    streams = []
    for index, load in enumerate(loads):
        top = ideal_rate(hardware, load, MOST) * size.replicas / len(loads) * FULL_LOAD * scale / 4
        arrivals = day(load, top, size.day_s, seed)
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
        fit_s=size.day_s / FITS,
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
    hardware = measured(system.sharing if system.trains else "30")
    replicas = lineup.cell(system.dispatcher, size.replicas, hardware, MOST)
    output_tokens = sum(load.mean_output for load in loads) / len(loads)
    latency: dict[str, LatencyModel] = {r.id: lineup.known(hardware, output_tokens) for r in replicas}
    slos: list[Slo] = [load.slo for load in loads]
    scheduler = lineup.scheduler(system.dispatcher, replicas, latency, ADAPTERS, seed)
    tallies = {load.name: Tally(bin_s=size.day_s / SLICES) for load in loads}
    whole = Tally(bin_s=size.day_s / SLICES)

    def observe(request: SimRequest) -> None:
        whole(request)
        tallies[request.slo.name](request)

    cell = Cell(replicas, scheduler, observe)
    timeline = Timeline(replicas)
    cell.every(size.day_s / SLICES, timeline)
    rules = training(size, system, seed)
    federation = None
    for replica in replicas:
        replica.loss = rules.curve.start
    if system.trains:
        coordinator = CoordinatorRules(slos[-1], pair=system.pair, fit_s=size.day_s / FITS, seed=seed)
        federation = Federation(cell, rules, coordinator, latency)
    cell.run(requests(loads, size, scale, seed, rules.curve.spread))
    seconds = cell.now * len(replicas)
    bins = [whole.bins.get(index) for index in range(SLICES)]
    return Result(
        system=system.name,
        scale=scale,
        seed=seed,
        figures=whole.figures(size.day_s),
        by_load={name: tally.figures(size.day_s) for name, tally in tallies.items()},
        activity=timeline.activity,
        memory=timeline.memory,
        combined=timeline.combined,
        running=timeline.running,
        good_per_bin=[(row.met if row else 0) / whole.bin_s for row in bins],
        offered_per_bin=[(row.offered if row else 0) / whole.bin_s for row in bins],
        qualities=whole.qualities,
        inference_share=sum(replica.busy_s for replica in replicas) / seconds,
        training_share=sum(replica.train_s for replica in replicas) / seconds,
        jobs=federation.jobs if federation else 0,
        reached=federation.reached if federation else [(0.0, rules.curve.start)],
    )
