"""Faults under load: python -m bench.chaos. Prints a table, and fails if the accounts are not even.

First every fault alone, in turn, then random pairs, one shortly after the other. Each has its time until every HTTP
service completes requests that were sent after it, and until every service works again.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench.chaos import accounts
from bench.chaos.cell import Cell, running
from bench.chaos.clients import Load, Question, Record, ask
from bench.chaos.faults import FAULTS, Damage, Fault
from collm_common.broker import AWAY
from collm_common.clock import SystemClock, ticks

WORDS = ("tide", "wheel", "lamp", "chain", "pier", "gull", "rope", "mast", "net", "oar", "buoy", "sail")
LOOK_S = 0.1
CALM_S = 1.0
PATIENCE_S = 90.0
SETTLE_S = 45.0
MEMORY_LIMIT = 0.25


@dataclass
class Hit:
    """One turn of the schedule. Seconds count from the end of its last fault; None if not within PATIENCE_S."""

    faults: tuple[Fault, ...]
    whom: str
    flow_s: float | None = None
    whole_s: float | None = None
    why: str = ""

    @property
    def problem(self) -> str:
        """What took too long, or never came back."""
        limit_s = max(fault.limit_s for fault in self.faults)
        name = " + ".join(fault.name for fault in self.faults)
        if self.flow_s is None or self.whole_s is None:
            return f"{name} ({self.whom}): not recovered within {PATIENCE_S:g} s: {self.why or 'no answers'}"
        if max(self.flow_s, self.whole_s) > limit_s:
            return f"{name} ({self.whom}): {self.flow_s:.1f} s and {self.whole_s:.1f} s, limit {limit_s:g} s"
        return ""


def schedule(faults: Sequence[Fault], count: int, rng: random.Random) -> list[tuple[Fault, ...]]:
    """`count` faults: half of them alone, each kind as often as any other, and the rest in random pairs."""
    alone: list[tuple[Fault, ...]] = []
    while len(alone) < (count + 1) // 2:
        alone += [(fault,) for fault in rng.sample(faults, len(faults))]
    alone = alone[: (count + 1) // 2]
    return alone + [tuple(rng.sample(faults, 2)) for _ in range((count - len(alone)) // 2)]


async def questions(cell: Cell) -> list[Question]:
    """The fixed set with the answers of the undisturbed cell. Lengths from 20 to 119 tokens."""
    asked = [
        Question(f"tell me about the {word} and the {other}", 20 + (7 * i + 29 * j) % 100)
        for i, word in enumerate(WORDS)
        for j, other in enumerate(WORDS[:2])
    ]
    url = next(iter(cell.urls.values()))
    answered = []
    for question in asked:
        record = Record("whole", url, time.monotonic())
        await ask(cell.session, question, record)
        assert record.completed, record.fault
        answered.append(dataclasses.replace(question, answer=record.text))
    assert len({question.answer for question in answered}) == len(answered), "two questions have the same answer"
    return answered


async def strike(cell: Cell, load: Load, faults: tuple[Fault, ...], rng: random.Random) -> Hit:
    """Bring the faults about, one shortly after the other, and wait until all is well again."""
    damages = []
    for fault in faults:
        damages.append(await fault.act(cell, rng))
        if fault is not faults[-1]:
            await asyncio.sleep(rng.uniform(0, CALM_S))
    hit = Hit(faults, ", ".join(damage.whom for damage in damages))
    end_s = time.monotonic()
    with suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            async for _ in ticks(LOOK_S, SystemClock()):
                if hit.flow_s is None and (flowed_s := load.flows_since(end_s)) is not None:
                    hit.flow_s = flowed_s - end_s
                if hit.whole_s is None and not (why := await trouble(cell, damages)):
                    hit.whole_s = time.monotonic() - end_s
                elif hit.whole_s is None:
                    hit.why = why
                if hit.flow_s is not None and hit.whole_s is not None:
                    break
    await asyncio.sleep(rng.uniform(0, CALM_S))
    return hit


async def trouble(cell: Cell, damages: Sequence[Damage]) -> str:
    """What does not work yet, "" when all does."""
    try:
        for damage in damages:
            if not await damage.healed():
                return f"nobody is in the place of {damage.whom}"
    except AWAY as error:
        return f"broker: {error}"
    return await cell.whole()


async def run(arguments: argparse.Namespace, folder: Path) -> tuple[list[Hit], list[Record], list[str]]:
    """(what every turn cost, all requests, all problems)."""
    rng = random.Random(arguments.seed)
    async with running(folder, {}, print) as cell:
        faults = [fault for fault in FAULTS if not fault.possible(cell) and arguments.only in fault.name]
        for fault in FAULTS:
            if reason := fault.possible(cell):
                print(f"left out: {fault.name}: {reason}")
        load = Load(list(cell.urls.values()), await questions(cell), arguments.rate, random.Random(arguments.seed))
        asking = asyncio.create_task(load.run())
        hits, first = [], await accounts.kept_bytes(cell.redis, cell.keys)
        for number, turn in enumerate(schedule(faults, arguments.count, rng)):
            hits.append(await strike(cell, load, turn, rng))
            print(told(number, hits[-1], load), flush=True)
            if number == len(faults):
                first = await accounts.kept_bytes(cell.redis, cell.keys)
        load.stop()
        await asking
        problems = [hit.problem for hit in hits if hit.problem]
        problems += accounts.of_requests(load.records)[1]
        problems += accounts.of_memory(first, await accounts.kept_bytes(cell.redis, cell.keys), MEMORY_LIMIT)
        happened, illegal = await accounts.of_events(cell.redis, cell.keys)
        print("meanwhile: " + ", ".join(f"{count} {what}" for what, count in sorted(happened.items())))
        problems += illegal + await settled(cell)
        return hits, load.records, problems


async def settled(cell: Cell) -> list[str]:
    """Problems with the keys once what the last requests left has had the time to go."""
    problems: list[str] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(SETTLE_S):
            async for _ in ticks(1.0, SystemClock()):
                if not (problems := await accounts.of_keys(cell.redis, cell.keys)):
                    break
    return problems


def told(number: int, hit: Hit, load: Load) -> str:
    """One line a turn."""
    times = " ".join(f"{value:5.1f} s" if value is not None else "  never" for value in (hit.flow_s, hit.whole_s))
    bad = sum(bool(record.fault) for record in load.records)
    name = " + ".join(fault.name for fault in hit.faults)
    return f"{number:4} {times}  {len(load.records)} requests, {bad} bad  {name} ({hit.whom})"


def table(hits: Sequence[Hit]) -> list[str]:
    """Rows of a Markdown table: each kind alone, then all pairs."""
    rows = ["| fault | times | flow again, median s | worst s | all works again, median s | worst s | limit s |"]
    rows.append("|---|---|---|---|---|---|---|")
    groups: dict[str, list[Hit]] = {}
    for hit in hits:
        groups.setdefault(hit.faults[0].name if len(hit.faults) == 1 else "two of these", []).append(hit)
    for name, group in groups.items():
        figures = []
        for values in ([hit.flow_s for hit in group], [hit.whole_s for hit in group]):
            known = [PATIENCE_S if value is None else value for value in values]
            figures += [f"{statistics.median(known):.1f}", f"{max(known):.1f}"]
        limits = sorted({max(fault.limit_s for fault in hit.faults) for hit in group})
        limit = " or ".join(f"{limit:g}" for limit in limits)
        rows.append(f"| {name} | {len(group)} | {' | '.join(figures)} | {limit} |")
    return rows


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="faults in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--keep", type=Path, help="where to copy the logs to")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the cell is taken down
    with tempfile.TemporaryDirectory(prefix="collm-chaos-") as folder:
        try:
            hits, records, problems = uvloop.run(run(arguments, Path(folder)))
        finally:
            if arguments.keep:
                shutil.copytree(Path(folder) / "run", arguments.keep, dirs_exist_ok=True)
    print("\n".join(table(hits)))
    ends = accounts.of_requests(records)[0]
    print("requests: " + ", ".join(f"{count} {end}" for end, count in sorted(ends.items())))
    print(f"longest time without a new part of an answer: {max(r.longest_pause_s for r in records):.1f} s")
    if problems:
        sys.exit("\n".join(["", *problems]))


if __name__ == "__main__":
    main()
