"""The page of results: what was run, the tables, and what they leave open."""

from __future__ import annotations

from pathlib import Path

import msgspec

from collm_tools.simulator.experiment import Result
from collm_tools.simulator.reproduce import pictures, tables
from collm_tools.simulator.reproduce.matrix import Runs
from collm_tools.simulator.workload import FULL_LOAD

NOTES = Path("notes.md")


def write(runs: Runs, out: Path) -> None:
    """README.md, pictures and figures.json into `out`; a `notes.md` that lies there is taken into the page."""
    out.mkdir(parents=True, exist_ok=True)
    pictures.draw(runs, out)
    (out / "README.md").write_text(page(runs, out))
    (out / "figures.json").write_bytes(msgspec.json.encode(_summary(runs)) + b"\n")


def page(runs: Runs, out: Path) -> str:
    """The whole page."""
    conv, code = runs.sweep["conv"], runs.sweep["code"]
    notes = (out / NOTES).read_text() if (out / NOTES).is_file() else ""
    parts = [
        _head(runs),
        notes,
        "## Goodput by scale\n\n![goodput and Q-goodput by scale](scales.png)\n",
        "Code, tokens/s in time:\n\n" + tables.figures(code, "goodput"),
        tables.goodput(code, "code"),
        "Conversations, tokens/s in time:\n\n" + tables.figures(conv, "goodput"),
        tables.goodput(conv, "conv"),
        "Both at once, at 3x (one seed):\n\n" + tables.simple(runs.merged, "system"),
        "## Q-goodput by scale\n\nConversations:\n\n" + tables.figures(conv, "q_goodput"),
        tables.q_goodput(conv),
        "## Utilisation at 3x\n\n![SM activity and memory over the day](utilisation.png)\n",
        "Conversations:\n\n" + tables.utilisation(conv),
        "## Training beside serving\n\n![quality of answers](quality.png)\n",
        "Conversations at 1x, all under CoLLM's dispatcher:\n\n" + tables.beside(runs.beside),
        f"## Coordinator against fixed batch sizes\n\nConversations at 3x, until cross-entropy {tables.TARGET:g}:\n\n"
        + tables.pairs(runs.pairs),
        "The trainer's share of the SMs (one seed):\n\n" + tables.simple(runs.shares, "share"),
        "## Dispatcher against round robin\n\n![running batch, answers in time](dispatcher.png)\n",
        "## Where the time goes\n\nConversations under CoLLM:\n\n" + tables.shares(conv),
        "## How much the learning curve matters\n\nIts scale times a factor, conversations at 1x (one seed):\n\n"
        + tables.simple(runs.learning, "scale"),
        "## Online against the exact optimum\n\nTwo replicas of qualities 1 and 1.5 that run a batch at a time, sums "
        f"over {runs.seeds} instances, requests weighed by quality:\n\n" + tables.optimum(runs),
    ]
    return "\n".join(part for part in parts if part)


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
    every = {**runs.sweep, "beside": runs.beside, "pairs": runs.pairs, "learning": runs.learning, "merged": runs.merged}
    return {name: [_row(result) for result in results] for name, results in every.items()}


def _row(result: Result) -> dict[str, object]:
    fields = ("system", "scale", "seed", "figures", "jobs")
    return {name: getattr(result, name) for name in fields}
