"""What the dispatcher's decisions cost: microseconds a request by queue length, and milliseconds a macro-cycle.

A request is counted once in, released once, and ended once, under a queue that stays as long as it is. Times are of
this process's CPU, so that other work on the machine hardly shows. With --limit-us it fails if a row is above it.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator

from collm_common.latency import LatencyModel, Line
from collm_common.types import ReplicaState, Slo
from collm_dispatcher.policy.balance import Balance, Demand
from collm_dispatcher.policy.fill import Carrier
from collm_dispatcher.policy.micro import Lane, MicroCycle, Release
from collm_dispatcher.policy.outlook import Fit
from collm_dispatcher.policy.pacing import Mode
from collm_dispatcher.policy.queue import Waiting
from collm_dispatcher.policy.streams import Stream

SLOS = (Slo("chat", ttft_s=0.5, tpot_s=0.05), Slo("code", e2e_s=0.5), Slo("batch"))
REQUESTS, TURN, B = 20_000, 16, 32


def requests(flows: int, seed: int) -> Iterator[Waiting]:
    """Without end: three streams, deadlines at random, `flows` tenants in turn."""
    draw, number = random.Random(seed), 0
    while True:
        slo = SLOS[number % 3]
        yield Waiting(
            slo.name, str(number), str(number), "i", 0, 0.0, draw.uniform(1, 1e6), slo, tenant=str(number % flows)
        )
        number += 1


def cycle_us(queued: int, replicas: int, flows: int) -> float:
    """CPU microseconds a request, from the queue to its end, in turns of up to `TURN` releases."""
    micro, coming = MicroCycle(), requests(flows, 1)
    lanes = [Lane(f"r{n}", Mode(B)) for n in range(replicas)]
    routes = {slo.name: [lane.id for lane in lanes] for slo in SLOS}
    micro.follow(lanes, routes)
    for _ in range(queued):
        micro.queue.add(next(coming))
    running: list[Release] = []
    while len(running) < replicas * B:
        running += turn(micro)
        micro.queue.add(next(coming))
    start_s, done = time.process_time(), 0
    while done < REQUESTS:
        for release in running[:TURN]:
            micro.ended(release.replica)
        del running[:TURN]
        for _ in range(TURN):
            micro.queue.add(next(coming))
        micro.queue.shed(0.0)
        released = turn(micro)
        running += released
        done += len(released)
    return 1e6 * (time.process_time() - start_s) / done


def turn(micro: MicroCycle) -> list[Release]:
    """What is released now, and carried out."""
    released, _ = micro.decide(0.0, TURN)
    for release in released:
        micro.queue.remove(release.item)
    return released


def plan_ms(replicas: int) -> tuple[float, float]:
    """CPU milliseconds of a macro-cycle: with fits that are new to it, and with known ones."""
    streams = {slo.name: Stream(slo) for slo in SLOS}
    draw, balance = random.Random(1), Balance()
    for stream in streams.values():
        for _ in range(200):
            stream.arrived(stream.slo, draw.randint(100, 2000), 1.0)
            stream.answered(draw.randint(10, 400), 0)
        stream.observe(1.0)
    demands = {name: Demand(0, 2.0 * replicas) for name in streams}
    fits = [
        Fit(LatencyModel(infer=Line(0.005 + draw.random() / 1e4, 0.0002), prefill_s_per_token=3e-5), 64)
        for _ in range(replicas)
    ]
    times = []
    for _ in range(2):
        start_s = time.process_time()
        modes = [{name: fit.mode(stream) for name, stream in streams.items()} for fit in fits]
        carriers = [Carrier(f"r{n}", ReplicaState.SERVING, True, row["chat"], 1.0, row) for n, row in enumerate(modes)]
        balance.tick(carriers, demands)
        times.append(1e3 * (time.process_time() - start_s))
    return times[0], times[1]


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit-us", type=float, help="fail if a request costs more than this")
    arguments = parser.parse_args()
    rows = [(queued, 16, 1) for queued in (10, 100, 1_000, 10_000, 100_000)]
    rows += [(1_000, replicas, 1) for replicas in (1, 100, 1_000)] + [(1_000, 16, flows) for flows in (4, 16)]
    print(f"{'queued':>8} {'replicas':>9} {'tenants':>8} {'us a request':>13}")
    worst = 0.0
    for queued, replicas, tenants in rows:
        cost = cycle_us(queued, replicas, tenants)
        worst = max(worst, cost)
        print(f"{queued:>8} {replicas:>9} {tenants:>8} {cost:>13.1f}")
    print(f"{'replicas':>8} {'ms a macro-cycle, new fits':>28} {'known fits':>12}")
    for replicas in (16, 100, 1_000):
        fresh, known = plan_ms(replicas)
        print(f"{replicas:>8} {fresh:>28.1f} {known:>12.1f}")
    if arguments.limit_us is not None and worst > arguments.limit_us:
        sys.exit(f"a request costs {worst:.1f} us, the limit is {arguments.limit_us:g}")


if __name__ == "__main__":
    main()
