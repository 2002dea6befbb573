"""`collm load`: offer requests to a running service and report what became of them."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from collm_common.errors import CollmError, DataError
from collm_common.types import Slo
from collm_tools.commands.types import Subcommands, at_least_one, positive
from collm_tools.load import metrics, picture, traces, traffic
from collm_tools.load.client import RequestRecord, Target
from collm_tools.load.prompts import Prompt, read_prompts
from collm_tools.load.runner import Offer, plan, run_load

DEFAULT_DURATION_S = 60.0


def add_parser(subcommands: Subcommands) -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "load",
        help="load generator: traces or synthetic arrivals, SLOs, goodput",
        description="Offer requests in an open loop; report latency, goodput and attainment over all of them.",
    )
    _target_options(parser.add_argument_group("what to ask"))
    arrival_options(parser.add_argument_group("when requests arrive"))
    slo_options(parser.add_argument_group("objective (all given limits must hold)"))
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="write the summary and every record")
    out.add_argument("--picture", type=Path, metavar="FILE", help="draw the run as PNG")
    parser.set_defaults(run=run)


def _target_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--url", default="http://127.0.0.1:8000", help="the service (default %(default)s)")
    group.add_argument("--model", required=True, help="model or adapter name, as in /v1/models")
    group.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="bearer token")
    group.add_argument("--prompts", type=Path, metavar="FILE", help="JSONL with prompts and reference answers")
    group.add_argument(
        "--max-tokens", type=at_least_one, help="cap on an answer's length (default: the trace's, or 64)"
    )
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--ignore-eos", action="store_true", help="answers have exactly the length asked for")
    group.add_argument("--timeout", type=positive, default=120.0, metavar="S", help="per request (default %(default)g)")
    group.add_argument("--cancel-after", type=positive, metavar="S", help="leave every answer that takes longer")
    group.add_argument("--max-in-flight", type=at_least_one, default=1000, help="more are not sent and count as failed")


def arrival_options(group: argparse._ArgumentGroup) -> None:
    """Which arrivals to play; read by `arrivals`."""
    group.add_argument("--trace", type=Path, metavar="FILE", help="Azure .csv or Mooncake .jsonl")
    group.add_argument("--arrivals", choices=("poisson", "gamma", "onoff"), default="poisson", help="without a trace")
    group.add_argument("--rate", type=positive, default=1.0, metavar="R", help="requests/s (default %(default)g)")
    group.add_argument("--cv", type=positive, default=2.0, help="gamma: coefficient of variation (default %(default)g)")
    group.add_argument("--on", type=positive, default=10.0, metavar="S", help="onoff: seconds of traffic")
    group.add_argument("--off", type=positive, default=10.0, metavar="S", help="onoff: seconds of silence")
    group.add_argument(
        "--scale", type=positive, default=1.0, metavar="X", help="play X times as fast, leaving nothing out"
    )
    group.add_argument("--duration", type=positive, metavar="S", help="stop offering after S seconds (no trace: 60)")
    group.add_argument("--seed", type=int, default=0)


def slo_options(group: argparse._ArgumentGroup) -> None:
    """Limits of the objective; read by `slo_of`."""
    group.add_argument("--slo-ttft", type=positive, metavar="MS", help="time to first token")
    group.add_argument("--slo-tpot", type=positive, metavar="MS", help="time per output token after the first")
    group.add_argument("--slo-e2e", type=positive, metavar="MS", help="end to end")
    group.add_argument("--slo-class", default="", metavar="NAME", help="an objective configured in the service")


def run(arguments: argparse.Namespace) -> int:
    """Play the load; 0 even if requests failed, for that is a result, but 1 if every single one did."""
    slo = slo_of(arguments)
    offers = plan(arrivals(arguments), _prompts(arguments), arguments.max_tokens, arguments.seed)
    if not offers:
        raise DataError("no request arrives in the given duration", field="duration")
    target = Target(
        url=arguments.url,
        model=arguments.model,
        slo=slo,
        slo_class=arguments.slo_class,
        api_key=arguments.api_key,
        timeout_s=arguments.timeout,
        cancel_after_s=arguments.cancel_after,
        temperature=arguments.temperature,
        ignore_eos=arguments.ignore_eos,
    )
    records = asyncio.run(_play(offers, target, arguments.max_in_flight))
    summary = metrics.summarize(records, slo, max(metrics.duration_s(records), arguments.duration or 0.0))
    Console().print(table(summary))
    if arguments.json:
        write_json(arguments.json, {"summary": summary, "slo": slo, "records": records})
    if arguments.picture:
        picture.draw(records, slo, arguments.picture)
    return int(summary.requests.failed == summary.requests.offered)


def arrivals(arguments: argparse.Namespace) -> list[traffic.Arrival]:
    """The arrivals that the options describe, scaled and cut. A synthetic rate is before scaling."""
    scale, limit_s = arguments.scale, arguments.duration
    if arguments.trace:
        played = traffic.scale(traces.read_trace(arguments.trace), scale)
        return traffic.cut(played, limit_s) if limit_s else played
    duration_s = (limit_s or DEFAULT_DURATION_S) * scale
    match arguments.arrivals:
        case "gamma":
            made = traffic.gamma(arguments.rate, arguments.cv, duration_s, arguments.seed)
        case "onoff":
            made = traffic.on_off(arguments.rate, arguments.on, arguments.off, duration_s, arguments.seed)
        case _:
            made = traffic.poisson(arguments.rate, duration_s, arguments.seed)
    return traffic.scale(made, scale)


def slo_of(arguments: argparse.Namespace) -> Slo:
    """Limits in seconds; without any, every whole answer counts."""
    ms = (arguments.slo_ttft, arguments.slo_tpot, arguments.slo_e2e)
    ttft_s, tpot_s, e2e_s = (value / 1000 if value is not None else None for value in ms)
    return Slo(name=arguments.slo_class or "load", ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=e2e_s)


def table(summary: metrics.Summary) -> Table:
    """The summary for people."""
    rows = Table(title="load", show_header=False)
    ask = summary.requests
    rows.add_row("offered", str(ask.offered))
    rows.add_row("completed / rejected / failed", f"{ask.completed} / {ask.rejected} / {ask.failed}")
    rows.add_row("goodput", f"{summary.goodput_tokens_per_s:.2f} tokens/s")
    rows.add_row("request goodput", f"{summary.request_goodput_per_s:.3f} requests/s")
    if summary.q_goodput is not None:
        rows.add_row("Q-goodput", f"{summary.q_goodput:.2f}")
    if summary.cross_entropy is not None:
        rows.add_row("cross-entropy", f"{summary.cross_entropy:.3f} nats a token")
    rows.add_row("inside the SLO", f"{summary.slo_attainment:.1%} of all offered")
    for name, values in (("TTFT", summary.ttft_ms), ("TPOT", summary.tpot_ms), ("end to end", summary.e2e_ms)):
        if values:
            rows.add_row(f"{name}, ms", "  ".join(f"{key} {value:.0f}" for key, value in values.items()))
    for error, times in summary.errors.items():
        rows.add_row("error", f"{times} x {error}")
    return rows


def write_json(path: Path, value: object) -> None:
    """Indented JSON; raises CollmError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    except OSError as error:
        raise CollmError(f"cannot write {path}: {error.strerror}") from error


def _prompts(arguments: argparse.Namespace) -> list[Prompt]:
    return read_prompts(arguments.prompts) if arguments.prompts else []


async def _play(offers: list[Offer], target: Target, max_in_flight: int) -> list[RequestRecord]:
    note = TextColumn("{task.fields[note]}")
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), note)
    tally = {"completed": 0, "rejected": 0, "failed": 0}
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("requests", total=len(offers), note="")

        def count(record: RequestRecord) -> None:
            tally[record.outcome] += 1
            progress.update(bar, advance=1, note=f"{tally['rejected']} rejected, {tally['failed']} failed")

        return await run_load(offers, target, max_in_flight=max_in_flight, on_done=count)
