"""How fast the simulator is: `python bench/simulator.py [--full]`; requests, CPU seconds, and of them a request.

`--full` adds ten hours of 16 replicas at four times the rates of the Azure traces, 750,000 requests.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from collm_tools.load.traffic import Arrival, poisson
from collm_tools.simulator import lineup, offers
from collm_tools.simulator.cell import Cell
from collm_tools.simulator.hardware import measured
from collm_tools.simulator.tally import Tally
from collm_tools.simulator.workload import SLOS, day, workload

PROMPT, OUTPUT = 256, 64


def steady(replicas: int, rate: float, seconds: float) -> Iterator[Arrival]:
    """Poisson arrivals of equal requests."""
    return (Arrival(arrival.at_s, PROMPT, OUTPUT) for arrival in poisson(rate, seconds, seed=replicas))


def measure(what: str, name: lineup.Name, replicas: int, arrivals: Iterator[Arrival], output_tokens: float) -> None:
    """Play it and print a row."""
    hardware = measured()
    cell = lineup.cell(name, replicas, hardware, 64)
    latency = {replica.id: lineup.known(hardware, output_tokens) for replica in cell}
    tally = Tally()
    began = time.process_time()
    Cell(cell, lineup.scheduler(name, cell, latency), tally).run(offers.offers(arrivals, SLOS["conv"]))
    spent = time.process_time() - began
    good = tally.met / max(1, tally.offered)
    each_us = 1e6 * spent / max(1, tally.offered)
    print(f"{what:48} {tally.offered:9,d} {spent:8.1f} s {each_us:7.1f} us {good:7.1%} in time")


def main() -> None:
    """All rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    full = parser.parse_args().full
    for count, seconds in ((16, 60.0), (128, 8.0), (1024, 2.0)):
        rate = 10.0 * count
        for name in ("collm", "round-robin") if count == 16 else ("collm",):
            what = f"{count} replicas, {rate:,.0f} requests/s, {name}"
            measure(what, name, count, steady(count, rate, seconds), OUTPUT)
    if full:
        conv = workload("conv", None)
        measure("ten hours, 16 replicas, 32 requests/s, collm", "collm", 16, day(conv, 32.4, 36000.0), conv.mean_output)


if __name__ == "__main__":
    main()
