"""Decoding beside a trainer on the same weights of a GPU: steps of both by SM share, B, b and context.

One process owns random weights in the shapes of Llama-3.1-8B and replays the engine's own decode step (a CUDA graph,
so that the context stays what it is); a second one trains LoRA on the same memory. A point lasts until the trainer has
made `--train-steps` whole steps. Writes one row of CSV a point, at once.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.gpu_model import (
    DEVICE,
    RANK,
    SHAPE,
    TINY,
    Owner,
    Result,
    engine_on,
    finish,
    model_folder,
    prompt_of,
    quantiles,
    request,
)  # fmt: skip
from collm_replica import weights
from collm_replica.engine.engine import Engine
from collm_replica.finetune.lora import Lora
from collm_replica.finetune.loss import precision
from collm_replica.models import skeleton
from collm_replica.mps import Mps
from collm_replica.sm_share import BACKGROUND
from collm_replica.sm_share import VARIABLE as SHARE
from collm_replica.telemetry import GpmUtilisation

TOKENS = 256
WINDOW_S = 0.6
POINT_S = 40.0
FIELDS = (
    "sharing", "sm_share", "train_batch", "tokens_per_sample", "sequences", "context", "step_median_ms", "step_p95_ms",
    "step_p99_ms", "steps", "sm_activity", "prefill_512_ms", "prefill_2048_ms", "train_step_median_ms", "train_steps",
    "train_peak_gb",
)  # fmt: skip
GRID: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    320: ((1, 8, 16, 32, 64), (1, 4, 16)),
    2000: ((1, 64), (4, 16)),
}
"""For each context: b and B."""
QUICK: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {320: ((64,), (4, 16))}


# --- the process that serves


class Trainer:
    """The second process; its step times come in as they are made."""

    def __init__(self, scratch: Path, options: list[str], environment: dict[str, str]) -> None:
        command = [sys.executable, __file__, "--trainer", str(scratch), *options]
        self._process: Any = subprocess.Popen(
            command, env=os.environ | environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._said: queue.Queue[Result] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self.attached = self.next()

    def next(self, within_s: float = 120.0) -> Result:
        """What it says next. Raises queue.Empty after `within_s`."""
        said = self._said.get(timeout=within_s)
        assert "ended" not in said, "the trainer has ended"
        return said

    def train(self, batch: int) -> None:
        """With B = `batch` from now on (0: pause); returns once it does."""
        print(batch, file=self._process.stdin, flush=True)
        while self.next().get("batch") != batch:
            pass

    def drain(self) -> list[Result]:
        """All that it has said."""
        said = []
        while not self._said.empty():
            said.append(self.next())
        return said

    def kill(self) -> None:
        """With -9."""
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        for line in self._process.stdout:
            if line.startswith("{"):
                self._said.put(json.loads(line))
        self._said.put({"ended": True})


class Rows:
    """The CSV file, a row at a time."""

    def __init__(self, path: Path, mode: str) -> None:
        self._file = path.open("a", newline="")
        self._table = csv.DictWriter(self._file, FIELDS, lineterminator="\n")
        if not self._file.tell():
            self._table.writeheader()
        self._mode = mode

    def write(self, batch: int, sequences: int, context: int, found: Result) -> None:
        """One point."""
        row: Result = {"train_batch": batch, "tokens_per_sample": TOKENS, "sequences": sequences, "context": context}
        if batch and self._mode == "turns":
            row["sharing"] = "turns"
        elif batch:
            row |= {"sharing": "mps", "sm_share": float(self._mode) / 100}
        row |= {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}
        self._table.writerow(row)
        self._file.flush()


@contextmanager
def decoding(engine: Engine, count: int, context: int) -> Iterator[Any]:
    """The captured step of `count` sequences at that context, ready to be replayed."""
    for number in range(count):
        engine.add(request(str(number), prompt_of(context - 8, number), 64, adapter=True))
    while engine.step().decode_tokens < count:
        pass
    for _ in range(6):
        engine.step()
    backend: Any = engine._backend
    yield backend._graphs._graphs[count, True].graph
    for number in range(count):
        engine.cancel(str(number))
    finish(engine)


def point(graph: Any, trainer: Trainer | None, train_steps: int) -> Result:
    """Steps of the graph until the trainer has made its own."""
    gpm = GpmUtilisation(0)
    for _ in range(10):
        timed_ms(graph)
    if trainer is not None:
        trainer.drain()
        trainer.next()
    gpm.read(0.0)
    steps, trained = list[float](), list[Result]()
    started_s = time.perf_counter()
    while (spent_s := time.perf_counter() - started_s) < POINT_S:
        steps.append(timed_ms(graph))
        trained += trainer.drain() if trainer is not None else []
        if spent_s > WINDOW_S and (trainer is None or len(trained) >= train_steps):
            break
    found = quantiles(steps)
    row: Result = {f"step_{name}_ms": found[name] for name in ("median", "p95", "p99")}
    row |= {"steps": len(steps), "sm_activity": gpm.read(0.0)}
    if trained:
        row["train_step_median_ms"] = statistics.median(one["ms"] for one in trained)
        row["train_steps"] = len(trained)
        row["train_peak_gb"] = max(one["peak_gb"] for one in trained)
    return row


def timed_ms(graph: Any) -> float:
    """One step, its tokens being waited for as the engine does."""
    started_s = time.perf_counter()
    graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - started_s) * 1e3


def prefill_ms(engine: Engine, length: int, seed: int) -> float:
    """Median of three prompts that were never seen before."""
    times = []
    for turn in range(3):
        engine.add(request("p", prompt_of(length, 100_000 + 10 * seed + turn), 1, adapter=True))
        started_s = time.perf_counter()
        finish(engine)
        times.append((time.perf_counter() - started_s) * 1e3)
    return statistics.median(times)


def serve(arguments: argparse.Namespace, scratch: Path) -> None:
    """All points of one mode."""
    mode, rows = arguments.serve, Rows(arguments.csv, arguments.serve)
    owner = Owner(model_folder(scratch / "model", arguments.layers))
    engine = engine_on(owner, max_batch=64, kv_bytes=arguments.kv_gb << 30, context_tokens=4096)
    (scratch / "export").write_bytes(owner.export())
    environment = {} if mode == "turns" else {SHARE: mode}
    if not arguments.equal:
        environment |= BACKGROUND
    trainer = Trainer(scratch, options(arguments), environment)
    print(json.dumps({"mode": mode} | trainer.attached), flush=True)
    for context, (sizes, batches) in (QUICK if arguments.quick else GRID).items():
        for count in sizes:
            with decoding(engine, count, context) as graph:
                rows.write(0, count, context, point(graph, None, 0))
                for batch in batches:
                    trainer.train(batch)
                    rows.write(batch, count, context, point(graph, trainer, arguments.train_steps))
                trainer.train(0)
    for batch in () if arguments.quick else (0, *GRID[320][1]):
        if batch:
            trainer.train(batch)
        rows.write(batch, 0, 0, {f"prefill_{length}_ms": prefill_ms(engine, length, batch) for length in (512, 2048)})
    with decoding(engine, 64, 320) as graph:
        trainer.train(4)
        trainer.kill()
        rows.write(0, 64, 320, point(graph, None, 0))


# --- the process that trains


def train(arguments: argparse.Namespace, scratch: Path) -> None:
    """Attach to the weights, then train B x 256 tokens a step while the input says a B above 0."""
    torch.zeros(1, device=DEVICE)
    before = torch.cuda.mem_get_info()[0]
    started_s = time.perf_counter()
    views, _ = weights.attach_device((scratch / "export").read_bytes())
    model = weights.assemble(skeleton(scratch / "model", torch.bfloat16), views)
    taken = before - torch.cuda.mem_get_info()[0]
    print(json.dumps({"attach_s": time.perf_counter() - started_s, "bytes": taken}), flush=True)
    lora = Lora(model, RANK, 2.0 * RANK)
    lora.load(lora.fresh(0))
    if arguments.recompute:
        lora.model.gradient_checkpointing_enable({"use_reentrant": False})
    if arguments.wide:
        for module in lora.model.modules():
            module.cast_input_dtype_enabled = True
    lora.model.train()
    optimizer = torch.optim.AdamW(lora.parameters, lr=1e-4)
    wanted: queue.Queue[int] = queue.Queue()
    threading.Thread(target=lambda: deque(map(wanted.put, map(int, sys.stdin)), 0), daemon=True).start()
    batch = 0
    while True:
        while not batch or not wanted.empty():
            batch = wanted.get()
            if batch:
                torch.cuda.reset_peak_memory_stats()
                step_ms(lora, optimizer, batch, arguments.wide)
            print(json.dumps({"batch": batch}), flush=True)
        ms = step_ms(lora, optimizer, batch, arguments.wide)
        print(json.dumps({"ms": ms, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}), flush=True)


def step_ms(lora: Lora, optimizer: torch.optim.Optimizer, batch: int, wide: bool) -> float:
    """One step of B x 256 random tokens, to its end on the device."""
    started_s = time.perf_counter()
    ids = torch.randint(0, 500, (batch, TOKENS), device=DEVICE)
    with nullcontext() if wide else precision(lora.model):
        loss = lora.model(input_ids=ids, labels=ids, use_cache=False).loss
    torch.autograd.backward(loss)
    norm = torch.nn.utils.get_total_norm([one.grad for one in lora.parameters if one.grad is not None])
    assert math.isfinite(float(norm)), "the gradient is not finite"
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    return (time.perf_counter() - started_s) * 1e3


# --- all


def options(arguments: argparse.Namespace) -> list[str]:
    """What all processes are given alike."""
    flags = [f"--{name}" for name in ("tiny", "quick", "recompute", "wide", "equal") if getattr(arguments, name)]
    numbers = {"layers": arguments.layers, "kv-gb": arguments.kv_gb, "train-steps": arguments.train_steps}
    return [*flags, *(f"--{name}={value}" for name, value in numbers.items()), f"--csv={arguments.csv}"]


def run(arguments: argparse.Namespace) -> None:
    """Each mode in processes of its own, under an MPS daemon of its own."""
    for mode in arguments.modes:
        command = [sys.executable, __file__, "--serve", mode, *options(arguments)]
        with tempfile.TemporaryDirectory(prefix="collm-mps-", dir="/tmp") as folder:
            mps = Mps(Path(folder)) if mode != "turns" else None
            if mps is not None:
                mps.start()
            try:
                own = mps.environment if mps is not None else {}
                subprocess.run(command, env=os.environ | own, check=True, timeout=arguments.limit_s)
            finally:
                if mps is not None:
                    mps.stop()


def main() -> None:
    """Parse, and be one of the three processes."""
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="*", default=["30", "60", "100", "turns"], help="percent of the SMs, or turns")
    parser.add_argument("--csv", type=Path, default=Path("beside.csv"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--kv-gb", type=int, default=24)
    parser.add_argument("--train-steps", type=int, default=5, help="whole steps of the trainer at a point")
    parser.add_argument("--quick", action="store_true", help="only b = 64 and B = 4, 16")
    parser.add_argument("--tiny", action="store_true", help="small shapes: whether the bench itself runs")
    parser.add_argument("--recompute", action="store_true", help="activations are recomputed, not kept")
    parser.add_argument("--wide", action="store_true", help="adapters compute in float32")
    parser.add_argument("--equal", action="store_true", help="the trainer's kernels do not come after those that serve")
    parser.add_argument("--limit-s", type=float, default=600.0, help="for one mode")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tiny:
        SHAPE.update(TINY)
    if arguments.trainer is not None:
        train(arguments, arguments.trainer)
    elif arguments.serve is not None:
        with tempfile.TemporaryDirectory() as scratch:
            serve(arguments, Path(scratch))
    else:
        run(arguments)


if __name__ == "__main__":
    main()
