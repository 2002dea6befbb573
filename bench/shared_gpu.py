"""Three replicas on one GPU: what training beside serving costs the requests, and what the coordinator chooses.

The whole stack with real services, under one MPS daemon where there is one. A burst, a lull with live load, a burst:
once without fine-tuning, once with a federated job of three rounds in the lull. `--model` is a folder, a GGUF file, or
`8b` for random weights in the shapes of Llama-3.1-8B, which say what it costs but cannot learn.
Writes NAME.json (attainment, goodput, quality) and NAME.csv (state, B, b and SM share of each replica over time).
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import uvloop
from msgspec import to_builtins

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from collm_common.broker import connection, stop_all
from collm_common.messages import TrainReport
from collm_common.types import Slo
from collm_replica.mps import Mps, MpsError
from collm_tools.commands.demo import write_data
from collm_tools.demo import timeline
from collm_tools.demo.corpus import Corpus, build
from collm_tools.demo.play import Play, fresh_digests, served_as
from collm_tools.demo.recorder import Recorder
from collm_tools.demo.report import CrossEntropy, adapter_swaps, federated
from collm_tools.load import metrics, traffic
from collm_tools.load.client import RequestRecord, Target
from collm_tools.load.runner import Offer, plan, run_load
from collm_tools.stack.options import StackOptions
from collm_tools.stack.stack import Stack

NAME, ADAPTER, REPLICAS, OUT_TOKENS = "model", "desk", 3, 48
FIELDS = (
    "seconds", "replica", "state", "train_batch", "limit", "running", "utilisation", "train_sm_share", "train_step_ms",
    "decode_ms",
)  # fmt: skip
Result = dict[str, Any]


def settings(slo: Slo, device: str, trained: bool, shares: Sequence[float], rounds: int, steps: int) -> dict[str, str]:
    """Of all services, by variable name."""
    limits = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s}
    rules = {
        "rounds": rounds,
        "steps": steps,
        "strategy": "product",
        "min_clients": 2,
        "hyper": {
            "rank": 8, "alpha": 16.0, "learning_rate": 1e-3, "base_samples": 4, "max_tokens": 256, "snapshot_steps": 4,
            "heldout_samples": 8,
        },
    }  # fmt: skip
    replica = {
        "DEVICE": device, "CONTEXT_TOKENS": "1024", "KV_MB": "4096" if device == "cuda" else "128", "MAX_BATCH": "32",
        "STEP_TOKENS": "1024", "THREADS": "2", "SM_SHARES": json.dumps(list(shares)) if device == "cuda" else "[]",
        "REPORT_S": "0.5",
    }  # fmt: skip
    return {f"COLLM_REPLICA_{name}": value for name, value in replica.items()} | {
        "COLLM_DISPATCHER_SLO_CLASSES": json.dumps({slo.name: limits}),
        "COLLM_COORDINATOR_SLO": json.dumps({"name": slo.name, **limits}),
        "COLLM_COORDINATOR_MAX_TRAIN_BATCH": "16",
        "COLLM_LAUNCHER_ADAPTERS": json.dumps({NAME: ADAPTER} if trained else {}),
        "COLLM_LAUNCHER_IDLE": json.dumps({"window": 6}),
        "COLLM_LAUNCHER_COOLDOWN_S": "600",
        "COLLM_LAUNCHER_RULES": json.dumps(rules),
    }


class Cell:
    """The stack, played once."""

    def __init__(self, arguments: argparse.Namespace, model: str, environment: Mapping[str, str], folder: Path) -> None:
        self.arguments, self.model, self.environment, self.folder = arguments, model, environment, folder
        self.slo = Slo("default", ttft_s=arguments.ttft_s, tpot_s=arguments.tpot_s)
        self.texts: Corpus = build(0)

    def offers(self) -> list[Offer]:
        """Burst, lull, burst."""
        high, low = self.arguments.rates
        seconds = self.arguments.seconds
        arrivals = traffic.phases([(high, 0.2 * seconds), (low, 0.6 * seconds), (high, 0.2 * seconds)], seed=0)
        return plan(arrivals, self.texts.traffic, OUT_TOKENS)

    async def play(self, trained: bool) -> Result:
        """With or without jobs; what came of it."""
        name = "trained" if trained else "plain"
        own = settings(
            self.slo, self.arguments.device, trained, self.arguments.shares, self.arguments.rounds, self.arguments.steps
        )
        options = StackOptions(
            model=self.model,
            served_name=NAME,
            run_dir=self.folder / name,
            replicas=REPLICAS,
            data_dirs=write_data(self.texts, self.folder / name / "data"),
            cache_dir=self.folder / "cache",
            env=own | dict(self.environment),
        )
        started_s = time.monotonic()
        try:
            async with Stack(options, print) as stack, connection(stack.redis_url) as redis:
                print(f"{name}: up after {time.monotonic() - started_s:.0f} s", flush=True)
                recorder = Recorder(redis, stack.keys)
                recording = asyncio.create_task(recorder.run())
                try:
                    asked = await served_as(redis, stack.keys, NAME, 10.0 if trained else 0.0)
                    target = Target(stack.url, asked, self.slo, slo_class=self.slo.name, ignore_eos=True)
                    play = Play(redis, stack.keys, recorder, target, print, heldout_gap_s=0.05)
                    return await stack.guard(self._perform(name, play, recorder))
                finally:
                    await stop_all(recording)
        finally:
            for log in sorted((options.run_dir / "logs").glob("*.log")):
                print(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-self.arguments.log_lines :]))

    async def _perform(self, name: str, play: Play, recorder: Recorder) -> Result:
        digests = await fresh_digests(play.redis, play.keys)
        before = await play.score(self.texts.heldout)
        begun_s = time.time()
        records = await run_load(self.offers(), play.target)
        await play.settle()
        after = await play.score(self.texts.heldout)
        same = digests == await fresh_digests(play.redis, play.keys)
        self._trace(name, begun_s, recorder)
        timeline.draw(
            self.arguments.out / f"{self.arguments.name}_{name}.png", begun_s, self.slo, records, recorder.events,
            recorder.reports, recorder.training,
        )  # fmt: skip
        quality = CrossEntropy(metrics.cross_entropy(before), metrics.cross_entropy(after), len(before))
        return {
            "load": to_builtins(metrics.summarize(records, self.slo, self.arguments.seconds)),
            "by_phase": self._phases(records),
            "cross_entropy": to_builtins(quality),
            "federated": to_builtins(federated(recorder.events)),
            "swaps": to_builtins(adapter_swaps(recorder.reports)),
            "base_weights_unchanged": same,
            "sizes": sorted({str(to_builtins(report.sizes)) for report in recorder.training}),
        }

    def _phases(self, records: Sequence[RequestRecord]) -> Result:
        """Attainment and mean cross-entropy of the answers, by phase."""
        seconds, found = self.arguments.seconds, Result()
        bounds = (0.0, 0.2 * seconds, 0.8 * seconds, seconds)
        for phase, begin, end in zip(("burst", "lull", "second burst"), bounds, bounds[1:], strict=False):
            inside = [record for record in records if begin <= record.at_s < end]
            found[phase] = {
                "requests": len(inside),
                "attainment": sum(record.met(self.slo) for record in inside) / max(1, len(inside)),
                "cross_entropy": metrics.cross_entropy(inside),
            }
        return found

    def _trace(self, name: str, begun_s: float, recorder: Recorder) -> None:
        with (self.arguments.out / f"{self.arguments.name}_{name}.csv").open("w", newline="") as file:
            rows = csv.DictWriter(file, FIELDS, lineterminator="\n")
            rows.writeheader()
            steps = deque(recorder.training)
            training: dict[str, TrainReport] = {}
            for report in recorder.reports:
                while steps and steps[0].time_s <= report.time_s:
                    step = steps.popleft()
                    training[step.replica] = step
                trainer = training.get(report.replica) if report.train_batch else None
                times = [one.mean_s for one in report.iterations]
                row: Result = {
                    "seconds": round(report.time_s - begun_s, 1),
                    "replica": report.replica,
                    "state": report.state.value,
                    "train_batch": report.train_batch,
                    "limit": report.limit,
                    "running": report.running,
                    "utilisation": round(report.utilisation, 3),
                    "decode_ms": round(1e3 * sum(times) / len(times), 2) if times else None,
                }
                if trainer is not None:
                    row |= {"train_sm_share": trainer.sizes.sm_share, "train_step_ms": round(1e3 * trainer.step_s, 1)}
                rows.writerow(row)


def big_model(folder: Path, layers: int) -> str:
    """Random weights in the shapes of Llama-3.1-8B, as safetensors, with a tokenizer of bytes."""
    from safetensors.torch import save_file

    from bench.gpu_model import DEVICE, model_folder
    from collm_replica.models import skeleton
    from tests.support.models import byte_tokenizer

    model_folder(folder, layers)
    byte_tokenizer().save_pretrained(folder)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, parameter in skeleton(folder, torch.bfloat16).named_parameters():
        if size > 4 << 30:
            shards.append({})
            size = 0
        flat = parameter.dim() < 2
        make = torch.ones if flat else torch.randn
        shards[-1][name] = (make(parameter.shape, dtype=torch.bfloat16, device=DEVICE) * (1.0 if flat else 0.02)).cpu()
        size += 2 * parameter.numel()
    places: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number}.safetensors"
        save_file(shard, folder / file)
        places |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return str(folder)


def main() -> None:
    """Parse, play, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True, help="of the results")
    parser.add_argument("--out", type=Path, default=Path("out/shared_gpu"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--plays", nargs="*", default=["plain", "trained"], choices=["plain", "trained"])
    parser.add_argument("--seconds", type=float, default=100.0, help="of load in one play")
    parser.add_argument("--rates", type=float, nargs=2, default=(8.0, 1.0), help="requests a second: bursts, lull")
    parser.add_argument("--shares", type=float, nargs="*", default=(0.1, 0.2, 0.3), help="SM shares to choose from")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--ttft-s", type=float, default=1.0)
    parser.add_argument("--tpot-s", type=float, default=0.05)
    parser.add_argument("--layers", type=int, default=32, help="of 8b")
    parser.add_argument("--log-lines", type=int, default=3, help="of each service's log, at the end")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results: Result = {"seconds": arguments.seconds, "rates": list(arguments.rates), "shares": list(arguments.shares)}
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="collm-gpu-")))
        environment: dict[str, str] = {}
        if arguments.device == "cuda":
            mps = Mps(Path(held.enter_context(tempfile.TemporaryDirectory(prefix="collm-mps-", dir="/tmp"))))
            try:
                mps.start()
                held.callback(mps.stop)
                environment = mps.environment
                results["mps"] = True
            except MpsError as error:
                results["mps"] = str(error)
        model = big_model(folder / "8b", arguments.layers) if arguments.model == "8b" else arguments.model
        cell = Cell(arguments, model, environment, folder)
        for name in arguments.plays:
            results[name] = uvloop.run(cell.play(name == "trained"))
            (arguments.out / f"{arguments.name}.json").write_text(json.dumps(results, indent=1) + "\n")
            print(json.dumps(results[name])[:3000], flush=True)


if __name__ == "__main__":
    main()
