"""Small cells for the tests of the simulator: known latencies, recorded events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collm_common.latency import LatencyModel, Line
from collm_common.types import Slo
from collm_tools.load.traffic import Arrival
from collm_tools.simulator.cell import Cell
from collm_tools.simulator.hardware import Hardware, linear
from collm_tools.simulator.offers import offers
from collm_tools.simulator.replica import Replica
from collm_tools.simulator.request import SimRequest
from collm_tools.simulator.scheduling import Scheduler
from collm_tools.simulator.subflows import Subflows

HARDWARE = linear(0.01, 0.0005, per_train_s=0.002, prefill_s_per_token=1e-4, most=16)
SLO = Slo("s", e2e_s=1.0, late="reject")
MakeScheduler = Callable[[Sequence[Replica]], Scheduler]


def replicas(count: int, most: int = 8, hardware: Hardware = HARDWARE, merging: bool = False) -> list[Replica]:
    """Equal ones, r0 on."""
    return [Replica(f"r{n}", hardware, most, merging=merging) for n in range(count)]


def known(cell: Sequence[Replica], output_tokens: float = 10.0) -> dict[str, LatencyModel]:
    """The fit that a perfect coordinator would find for `HARDWARE`."""
    line = Line(0.01, 0.0005, 0.002)
    return {replica.id: LatencyModel(line, None, 1e-4, output_tokens) for replica in cell}


def subflows(cell: Sequence[Replica]) -> Subflows:
    """The live policy over them."""
    return Subflows(cell, known(cell))


def play(
    arrivals: Sequence[Arrival], make: MakeScheduler, cell: Sequence[Replica], slo: Slo = SLO, adapters: int = 1
) -> list[SimRequest]:
    """What became of the arrivals, in the order in which they ended."""
    ended: list[SimRequest] = []
    Cell(cell, make(cell), ended.append).run(offers(arrivals, slo, adapters))
    return ended
