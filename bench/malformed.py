"""Ten thousand malformed requests against a whole front with the fake engine: no 5xx, no hang, and no memory kept.

The requests are those of tests/ingress/malformed.py, from a seed. Prints how often each status was answered, and fails
if the process holds more than --limit-mib more after the last turn than after the second; the first two warm it up.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collm_common.broker import connect
from collm_common.keys import Keys
from tests.ingress.malformed import send_malformed
from tests.ingress.support import front, text
from tests.support.broker import Broker
from tests.support.models import byte_tokenizer

MIB, TURNS = 2**20, 10


async def measure(count: int, seed: int, broker: Broker, folder: Path) -> tuple[Counter[int], list[float]]:
    """Statuses, and MiB of this process after each turn."""
    byte_tokenizer().save_pretrained(folder)
    redis, statuses, held = connect(broker.url), Counter[int](), list[float]()
    async with front(redis, Keys(), folder, adapter_dir=str(folder)) as site:
        for turn in range(TURNS):
            statuses += await send_malformed(site, seed + turn, count // TURNS)
            gc.collect()
            held.append(psutil.Process().memory_info().rss / MIB)
            print(f"{(turn + 1) * count // TURNS:6d} requests, {held[-1]:6.1f} MiB", flush=True)
        assert len(site.ingress.opened) == 0
        assert (await site.post("/v1/completions", text()))[0] == 200
    await redis.aclose()
    return statuses, held


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--limit-mib", type=float, default=16.0)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    broker = Broker()
    broker.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            statuses, held = asyncio.run(measure(options.requests, options.seed, broker, Path(folder)))
    finally:
        broker.close()
    print(", ".join(f"{status}: {count}" for status, count in sorted(statuses.items())))
    grown = held[-1] - held[1]
    print(f"{grown:+.1f} MiB since the second turn")
    return int(grown > options.limit_mib)


if __name__ == "__main__":
    sys.exit(main())
