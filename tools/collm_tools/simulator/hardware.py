"""How long a simulated replica takes: tables over (B, b), measured on a GPU or made up for a test."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from statistics import fmean, median
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from collm_common.errors import DataError

FloatArray = NDArray[np.float64]

Sharing = Literal["30", "60", "100", "timeslice"]
"""The trainer's share of the SMs in percent, under MPS; or time slicing."""

SECTIONS = {"30": ("mps", "0.3"), "60": ("mps", "0.6"), "100": ("mps", "1.0"), "timeslice": ("turns", "")}
GRID = "beside_h200.csv"
SHORT, LONG = 320, 2000
"""Contexts in the grid, tokens."""

MICRO_STEP_SLOWED_BY_PREFILL = 1310 / 596
"""A trainer of B = 4 at 30 % beside steady prefill, over the same beside steady decode (milliseconds a step, H200)."""

MERGED_DECODE, MERGED_PREFILL = 0.92, 0.947
"""The engine's time without LoRA over that with it: 4.60 / 5.05 to 5.57 / 6.02 ms a step, 372 / 393 ms a prefill."""

MIXED_S = 0.0144
"""A step with a prefill in it has no graph: launching its kernels takes this long however few its tokens (H200)."""

IDLE_ACTIVITY, PREFILL_ACTIVITY = 0.03, 0.9
"""Of the SMs; that of prefill is assumed."""

STEP_TOKENS = 2048
"""Of the grid's prefill, and at most in one step."""

Table = tuple[tuple[float, ...], ...]


class Hardware(Struct, frozen=True):
    """Tables by train batch B (0: no training) and running batch b, in seconds; their last entry holds beyond them.

    `decode[B][b]` is one iteration, `prefill[B]` what a prompt token adds to one, `micro_step[B]` one training
    micro-step beside decodes; an iteration with prompts in it takes at least `mixed_s`. `activity[B][b]` is that of
    the SMs in 0..1, `prefill_activity[B]` the same while prompts are prefilled.
    """

    decode: Table
    prefill: tuple[float, ...]
    micro_step: tuple[float, ...]
    activity: Table
    prefill_activity: tuple[float, ...]
    step_tokens: int = 2048
    mixed_s: float = 0.0

    @property
    def most(self) -> int:
        """The largest running batch that the tables speak of."""
        return len(self.decode[0]) - 1

    @property
    def most_train(self) -> int:
        """The largest B."""
        return len(self.decode) - 1


def linear(
    base_s: float,
    per_sequence_s: float = 0.0,
    per_train_s: float = 0.0,
    prefill_s_per_token: float = 0.0,
    micro_step_s: float = 0.1,
    most: int = 64,
    most_train: int = 16,
    step_tokens: int = 2048,
) -> Hardware:
    """T(B, b) = base + per_sequence b + per_train B; a micro-step takes `micro_step_s` a sample."""
    trains, batches = range(most_train + 1), range(most + 1)
    beside = [0.3 if train else 0.0 for train in trains]
    return Hardware(
        decode=tuple(tuple(base_s + per_sequence_s * b + per_train_s * train for b in batches) for train in trains),
        prefill=(prefill_s_per_token,) * (most_train + 1),
        micro_step=tuple(micro_step_s * max(1, train) for train in trains),
        activity=tuple(tuple(both(0.5 if b else IDLE_ACTIVITY, beside[train]) for b in batches) for train in trains),
        prefill_activity=tuple(both(PREFILL_ACTIVITY, beside[train]) for train in trains),
        step_tokens=step_tokens,
    )


def both(first: float, second: float) -> float:
    """The SM activity of two processes that do not look at each other: 1 - (1 - u)(1 - v)."""
    return 1 - (1 - first) * (1 - second)


@cache
def measured(
    sharing: Sharing = "30", slower: float = 1.0, most_train: int = 16, context_tokens: float = SHORT
) -> Hardware:
    """An H200 with an 8B model, `slower` times slower: the engine's own grid, straight between its points.

    Every sequence's context beyond the grid's shorter one costs what it does between the grid's two contexts at 64
    sequences. A trainer's step is the least-squares line over B. The activity of a trainer alone was not measured: it
    is what explains that of both, as of independent ones; by turns it has all SMs while it is alone.
    """
    rows = _rows(sharing)
    alone = _rows("100") if sharing == "timeslice" else rows
    batches = sorted({row.train for row in rows})
    sizes = sorted({row.infer for row in rows if row.infer})
    context_s = [
        (_one(rows, train, sizes[-1], LONG).step_s - _one(rows, train, sizes[-1], SHORT).step_s)
        / ((LONG - SHORT) * sizes[-1])
        for train in (b for b in batches if b != 1)
    ]
    longer = np.interp(range(most_train + 1), [b for b in batches if b != 1], context_s) * (context_tokens - SHORT)
    decode = _table(batches, sizes, most_train, [[_one(rows, t, b, SHORT).step_s for b in sizes] for t in batches])
    activity = _table(batches, sizes, most_train, [[_one(rows, t, b, SHORT).activity for b in sizes] for t in batches])
    prefill = [_one(rows, t, 0, 0).prefill_s - _one(rows, t, 1, SHORT).step_s for t in batches]
    trainer = np.interp(range(most_train + 1), batches, [_trainer_activity(alone, t, sizes) for t in batches])
    told = [(row.train, row.micro_step_s) for row in rows if row.train and row.context == SHORT]
    slope, base = np.polyfit([train for train, _ in told], [seconds for _, seconds in told], 1)
    return Hardware(
        decode=tuple(
            tuple(slower * float(value + longer[train] * b) for b, value in enumerate(row))
            for train, row in enumerate(decode)
        ),
        prefill=tuple(
            slower * float(value) / STEP_TOKENS for value in np.interp(range(most_train + 1), batches, prefill)
        ),
        micro_step=tuple(slower * float(max(0.0, base) + slope * max(1, train)) for train in range(most_train + 1)),
        activity=tuple(
            (both(IDLE_ACTIVITY, float(trainer[train])), *map(float, row[1:])) for train, row in enumerate(activity)
        ),
        prefill_activity=tuple(both(PREFILL_ACTIVITY, float(value)) for value in trainer),
        step_tokens=STEP_TOKENS,
        mixed_s=slower * MIXED_S,
    )


class Row(Struct, frozen=True):
    """A point of the grid, or the median of its repetitions; 0 where something was not measured."""

    train: int
    infer: int
    context: int
    step_s: float
    activity: float
    prefill_s: float
    micro_step_s: float


def _rows(sharing: Sharing) -> list[Row]:
    """What was measured alone, at any time, and beside a trainer of this share."""
    section, found = SECTIONS[sharing], []
    wanted = [row for row in _grid() if row["train_batch"] == "0" or (row["sharing"], row["sm_share"]) == section]
    points = sorted({(int(row["train_batch"]), int(row["sequences"]), int(row["context"])) for row in wanted})
    for point in points:
        rows = [r for r in wanted if (int(r["train_batch"]), int(r["sequences"]), int(r["context"])) == point]
        step, activity, prefill, micro = (
            median([float(row[name]) for row in rows if row[name]] or [0.0])
            for name in ("step_median_ms", "sm_activity", "prefill_2048_ms", "train_step_median_ms")
        )
        found.append(Row(*point, step / 1000, activity, prefill / 1000, micro / 1000))
    return found


def _one(rows: Sequence[Row], train: int, infer: int, context: int) -> Row:
    return next(row for row in rows if (row.train, row.infer, row.context) == (train, infer, context))


def _trainer_activity(rows: Sequence[Row], train: int, sizes: Sequence[int]) -> float:
    """v of 1 - (1 - u)(1 - v), u that of decoding alone; the mean over b."""
    if not train:
        return 0.0
    pairs = [(_one(rows, 0, b, SHORT).activity, _one(rows, train, b, SHORT).activity) for b in sizes]
    return fmean(max(0.0, 1 - (1 - shared) / (1 - alone)) for alone, shared in pairs)


def _table(
    batches: Sequence[int], sizes: Sequence[int], most_train: int, values: Sequence[Sequence[float]]
) -> FloatArray:
    """(B, b) from 0 on, linear between the measured ones."""
    wide: FloatArray = np.array([np.interp(range(sizes[-1] + 1), sizes, row) for row in values])
    return np.array([np.interp(range(most_train + 1), batches, column) for column in wide.T]).T


def _grid() -> list[dict[str, str]]:
    try:
        return list(csv.DictReader((files("collm_tools.simulator") / "data" / GRID).read_text().splitlines()))
    except FileNotFoundError as error:
        raise DataError(f"{GRID} is not installed", field="hardware") from error
