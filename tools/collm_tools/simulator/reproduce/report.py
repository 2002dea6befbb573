"""The page of results: what was run, the tables, and what they leave open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from collm_tools.simulator.experiment import Result
from collm_tools.simulator.reproduce import pictures, tables
from collm_tools.simulator.reproduce.matrix import HOURS, MORNING, Runs
from collm_tools.simulator.workload import FULL_LOAD

NOTES = Path("notes.md")


def write(runs: Runs, out: Path) -> None:
    """README.md, pictures and figures.json into `out`; a `notes.md` that lies there is taken into the page."""
    out.mkdir(parents=True, exist_ok=True)
    pictures.draw(runs, out)
    (out / "README.md").write_text(page(runs, out))
    (out / "figures.json").write_bytes(msgspec.json.encode(_summary(runs)) + b"\n")


def page(runs: Runs, out: Path) -> str:
    """The whole page, of the parts that were run."""
    notes = (out / NOTES).read_text() if (out / NOTES).is_file() else ""
    return "\n".join(part for part in (_head(runs), notes, *_sections(runs)) if part)


def _sections(runs: Runs) -> Iterator[str]:
    conv, code = runs.of("conv"), runs.of("code")
    if conv and code:
        yield "## Goodput by scale\n\n![goodput and Q-goodput by scale](scales.png)\n"
        yield "Code, tokens/s in time:\n\n" + tables.figures(code, "goodput")
        yield tables.goodput(code, "code")
        yield "Conversations, tokens/s in time:\n\n" + tables.figures(conv, "goodput")
        yield tables.goodput(conv, "conv")
    if merged := runs.of("merged"):
        yield "Both at once, at 3x:\n\n" + tables.simple(merged, "system")
    if conv and code:
        for name, results in (("Conversations", conv), ("Code", code)):
            yield f"## Q-goodput by scale: {name.lower()}\n\n" + tables.figures(results, "q_goodput")
            yield tables.q_goodput(results)
        yield "## Utilisation at 3x\n\n![SM activity and memory over the day](utilisation.png)\n"
        yield "Conversations:\n\n" + tables.utilisation(conv)
    if beside := runs.of("beside"):
        yield "## Training beside serving\n\n![quality of answers](quality.png)\n"
        yield "Conversations at 1x, all under CoLLM's dispatcher:\n\n" + tables.beside(beside)
    if pairs := runs.of("pairs"):
        yield "## Coordinator against fixed batch sizes\n"
        yield PAIRS_HEAD.format(size=MORNING, target=tables.TARGET, load=pairs[0].scale) + tables.pairs(pairs)
    if shares := runs.of("shares"):
        yield "The trainer's share of the SMs:\n\n" + tables.simple(shares, "share")
    if conv and code:
        yield "## Dispatcher against round robin\n\n![running batch, answers in time](dispatcher.png)\n"
        yield "## Where the time goes\n\nConversations under CoLLM:\n\n" + tables.shares(conv)
        yield "Code:\n\n" + tables.shares(code)
    if learning := runs.of("learning"):
        yield "## How much the learning curve matters\n\nIts scale times a factor, conversations at 1x:\n"
        yield tables.simple(learning, "scale")
    if runs.optimum:
        yield OPTIMUM_HEAD.format(seeds=runs.seeds) + tables.optimum(runs)
    if hours := runs.of("hours"):
        yield HOURS_HEAD.format(size=HOURS) + tables.hours(hours)


def spoken(runs: Runs) -> Iterator[str]:
    """What a terminal shows of it."""
    for count, found in runs.optimum.items():
        worth = tables.share_of_optimum(found)
        yield f"{count} requests, 2 replicas: online makes {worth:.2f} of the exact optimum"
    for day in runs.of("hours"):
        yield tables.told(day)


PAIRS_HEAD = """Conversations at {load:g}x on {size.replicas} replicas, the first {size.until_s:g} s of a day of ten
hours at full speed. Joint completion is when cross-entropy {target:g} is published. Over the coordinator's, by seed:

"""

OPTIMUM_HEAD = """## Online against the exact optimum

Two replicas of qualities 1 and 1.5 that run a batch at a time; sums over {seeds} instances of requests weighed by
quality:

"""

HOURS_HEAD = """## How long ten hours take

{size.replicas} replicas, ten hours under {size.copies:g} copies of both traces laid over one another, with training, on
one core:

"""


def _head(runs: Runs) -> str:
    size = runs.size
    return f"""# Results of the simulator

Written by `make reproduce`: {runs.seeds} seeds, {size.replicas} replicas, batches up to 64, days of {size.day_s:g} s
from {runs.traces}. Figures are mean ± standard deviation over the seeds. Training, its windows and the
learning curve are {size.hasten:g} times as fast as at full scale, where a day has ten hours (`make reproduce FULL=1`).
Scale 4 offers {FULL_LOAD:g} times what the replicas carry in ideal mode at the profile's top level, scale 1 a quarter.
Objectives: code end to end in 0.5 s; conversations with the first token in 0.5 s and 50 ms a token.
"""


def _summary(runs: Runs) -> dict[str, object]:
    return {name: [_row(result) for result in results] for name, results in runs.days.items()}


def _row(result: Result) -> dict[str, object]:
    fields = ("system", "scale", "seed", "figures", "by_load", "jobs", "inference_share", "training_share", "overhead")
    return {name: getattr(result, name) for name in fields}
