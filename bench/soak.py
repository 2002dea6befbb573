"""A steady load for a long time on a local stack with the fake engine: does anything grow?

Samples the resident memory of every process, the broker's memory, its number of keys and the length of every stream.
Compares the median of the window after the warm-up with that of the last window of the same length, and fails if
anything grew by more than the limit. Prints a table and writes every sample to --csv.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import uvloop
from redis.asyncio import Redis

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collm_common.broker import connection
from collm_common.clock import SystemClock, ticks
from collm_common.types import Slo
from collm_tools.load.client import RequestRecord, Target
from collm_tools.load.runner import plan, run_load
from collm_tools.load.traffic import poisson
from collm_tools.stack.options import StackOptions
from collm_tools.stack.service import Service
from collm_tools.stack.stack import Stack
from tests.support.models import tiny_model_folder

MIB = 2**20
SAMPLES = 240
Sample = dict[str, float]


def processes(service: Service) -> Iterable[tuple[str, psutil.Process]]:
    """Name and process of a service and of its children."""
    if service.process is None:
        return
    parent = psutil.Process(service.process.pid)
    yield service.spec.name, parent
    for child in parent.children():
        yield f"{service.spec.name} {child.cmdline()[2].rpartition('.')[2]}", child


async def sample(stack: Stack, redis: Redis) -> Sample:
    """MiB of every process and of the broker, and counts of what the broker holds."""
    values: Sample = {}
    services = [*stack.services, *([stack.broker] if stack.broker else [])]
    for service in services:
        for name, process in processes(service):
            with suppress(psutil.Error):
                values[f"{name} MiB"] = process.memory_info().rss / MIB
    memory = await redis.info("memory")
    values["broker data MiB"] = memory["used_memory"] / MIB
    values["keys"] = await redis.dbsize()
    async for key in redis.scan_iter(count=1000, _type="stream"):
        values[f"entries of {key.decode()}"] = await redis.xlen(key)
    return values


def verdict(samples: list[tuple[float, Sample]], warmup_s: float, limit: float) -> tuple[list[list[str]], list[str]]:
    """(rows of what was measured in the first and last window, what grew by more than `limit`).

    The windows are a fifth of the time after the warm-up. A count may also grow by 2: a stream of two entries that had
    one is no leak.
    """
    end_s = samples[-1][0]
    width_s = (end_s - warmup_s) / 5
    names = sorted({name for _, values in samples for name in values})
    rows, grown = [], []
    for name in names:
        first = [v.get(name, 0.0) for at, v in samples if warmup_s <= at <= warmup_s + width_s]
        last = [v.get(name, 0.0) for at, v in samples if at >= end_s - width_s]
        before, after = statistics.median(first), statistics.median(last)
        slack = limit * before if name.endswith("MiB") else max(2.0, limit * before)
        rows.append([name, f"{before:.1f}", f"{after:.1f}", f"{100 * (after / before - 1):+.1f} %" if before else ""])
        if after - before > slack:
            grown.append(f"{name}: {before:.1f} -> {after:.1f}")
    return rows, grown


async def watch(stack: Stack, redis: Redis, every_s: float, samples: list[tuple[float, Sample]]) -> None:
    """One sample each `every_s` seconds until cancelled."""
    start_s = time.monotonic()
    async for _ in ticks(every_s, SystemClock()):
        values = await sample(stack, redis)
        samples.append((time.monotonic() - start_s, values))


async def run(minutes: float, rate: float, folder: Path) -> tuple[list[tuple[float, Sample]], Counter[str]]:
    """(samples as (seconds, values), how many requests ended how)."""
    model = tiny_model_folder(folder / "model", "llama")
    env = {"ENGINE": "fake", "FAKE_STEP_S": "0.01", "CONTEXT_TOKENS": "512", "REPORT_S": "0.25"}
    env = {f"COLLM_REPLICA_{name}": value for name, value in env.items()}
    options = StackOptions(str(model), "tiny", folder / "run", port=0, env=env, cache_dir=folder / "cache")
    samples: list[tuple[float, Sample]] = []
    outcomes: Counter[str] = Counter()

    def count(record: RequestRecord) -> None:
        outcomes[record.outcome if not record.error else f"{record.outcome}: {record.error}"] += 1
        record.text = ""

    async with Stack(options, print) as stack, connection(stack.redis_url) as redis:
        watcher = asyncio.create_task(watch(stack, redis, 60 * minutes / SAMPLES, samples))
        offers = plan(poisson(rate, 60 * minutes), [], max_tokens=32)
        await stack.guard(run_load(offers, Target(stack.url, "tiny", Slo("default")), on_done=count))
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    return samples, outcomes


def write(path: Path, samples: list[tuple[float, Sample]]) -> None:
    """One row a sample, one column a figure."""
    names = sorted({name for _, values in samples for name in values})
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["seconds", *names])
        for at, values in samples:
            table.writerow([f"{at:.0f}", *(f"{values[name]:.2f}" if name in values else "" for name in names)])


def main() -> None:
    """Parse, run, print; exit status 1 if something grew or a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warmup-minutes", type=float, default=12.0, help="until every bounded stream is full")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--limit", type=float, default=0.05, help="growth that is none, as a fraction")
    parser.add_argument("--csv", type=Path, help="where to write every sample")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="collm-soak-") as folder:
        samples, outcomes = uvloop.run(run(arguments.minutes, arguments.rate, Path(folder)))
    if arguments.csv:
        write(arguments.csv, samples)
    rows, grown = verdict(samples, 60 * arguments.warmup_minutes, arguments.limit)
    for name, before, after, change in rows:
        print(f"{name:<44} {before:>10} {after:>10} {change:>9}")
    print("requests: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items())))
    problems = grown + [outcome for outcome in outcomes if outcome != "completed"]
    if problems:
        sys.exit("not flat: " + "; ".join(problems))


if __name__ == "__main__":
    main()
