"""Every scheduler by its name on the command line, and the cell it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from collm_common.latency import LatencyModel, Line
from collm_tools.simulator.baselines.dlora import DLora
from collm_tools.simulator.baselines.shepherd import Shepherd
from collm_tools.simulator.baselines.spreading import LeastLoaded, PowerOfTwo, RoundRobin
from collm_tools.simulator.hardware import Hardware
from collm_tools.simulator.replica import Replica
from collm_tools.simulator.scheduling import Scheduler
from collm_tools.simulator.subflows import Subflows

Name = Literal["collm", "dlora", "shepherd", "round-robin", "least-loaded", "power-of-two"]
NAMES: tuple[Name, ...] = get_args(Name)


FIFO: tuple[Name, ...] = ("dlora", "round-robin", "least-loaded", "power-of-two")
MERGING: tuple[Name, ...] = ("dlora", "shepherd")


def scheduler(
    name: Name,
    replicas: Sequence[Replica],
    latency: Mapping[str, LatencyModel],
    adapters: int = 1,
    seed: int = 0,
) -> Scheduler:
    """The scheduler of that name over the replicas; `latency` is what is known of them."""
    match name:
        case "collm":
            return Subflows(replicas, latency)
        case "dlora":
            return DLora(replicas, adapters)
        case "shepherd":
            return Shepherd(replicas, adapters, latency[replicas[0].id])
        case "round-robin":
            return RoundRobin(replicas)
        case "least-loaded":
            return LeastLoaded(replicas)
        case "power-of-two":
            return PowerOfTwo(replicas, seed)


def cell(name: Name, count: int, hardware: Hardware, most: int) -> list[Replica]:
    """Equal replicas of at most `most` sequences, with the order and the merging that their scheduler has."""
    fifo, merging = name in FIFO, name in MERGING
    return [Replica(f"r{n}", hardware, min(most, hardware.most), fifo=fifo, merging=merging) for n in range(count)]


def known(hardware: Hardware, output_tokens: float) -> LatencyModel:
    """What a replica that serves alone is known to take: the line between the ends of its table."""
    first, last = hardware.decode[0][1], hardware.decode[0][-1]
    slope = (last - first) / (hardware.most - 1)
    return LatencyModel(Line(first - slope, slope), None, hardware.prefill[0], output_tokens)
