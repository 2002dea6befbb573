"""How long a simulated replica takes: tables over (B, b), measured on a GPU or made up for a test."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from importlib.resources import files
from statistics import median
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from collm_common.errors import DataError

FloatArray = NDArray[np.float64]

Sharing = Literal["30", "60", "100", "timeslice"]
"""The trainer's share of the SMs in percent, under MPS; or time slicing."""

PREFILL_ROWS = {"30": "30", "60": "100", "100": "100", "timeslice": "100"}
"""Prefill was measured beside a trainer at 30 % and 100 %; where it was not, the slower one stands in."""

MICRO_STEP_SLOWED_BY_PREFILL = 1310 / 596
"""A trainer of B = 4 at 30 % beside steady prefill, over the same beside steady decode (milliseconds a step, H200)."""

ENGINE_S = ((1, 0.00505), (16, 0.00542), (64, 0.00602))
"""(n, a step of the engine with adapters). The grid beside trainers was measured with a slower forerunner of it: what a
trainer adds is taken from the grid, and added to these (H200, docs/engine.md)."""

MERGED_DECODE, MERGED_PREFILL = 0.92, 0.947
"""The engine's time without LoRA over that with it: 4.60 / 5.05 to 5.57 / 6.02 ms a step, 372 / 393 ms a prefill."""

IDLE_ACTIVITY, LEAST_ACTIVITY, MOST_ACTIVITY = 0.03, 0.45, 0.61
PREFILL_ACTIVITY = 0.9
TRAINER_ACTIVITY: dict[str, float] = {"30": 0.27, "60": 0.54, "100": 0.9, "timeslice": 0.9}


class Hardware(Struct, frozen=True):
    """Tables by train batch B (0: no training) and running batch b, in seconds; their last entry holds beyond them.

    `decode[B][b]` is one iteration, `prefill[B]` what a prompt token adds to one, `micro_step[B]` one training
    micro-step beside decodes. `trainer_activity` is the SM activity of a trainer alone.
    """

    decode: tuple[tuple[float, ...], ...]
    prefill: tuple[float, ...]
    micro_step: tuple[float, ...]
    step_tokens: int = 2048
    trainer_activity: float = TRAINER_ACTIVITY["30"]

    @property
    def most(self) -> int:
        """The largest running batch that the tables speak of."""
        return len(self.decode[0]) - 1

    @property
    def most_train(self) -> int:
        """The largest B."""
        return len(self.decode) - 1

    def activity(self, running: int, prefilling: bool, training: bool) -> float:
        """SM activity in 0..1. Two processes combine as independent ones: 1 - (1 - u)(1 - v).

        Measured: 0.45 at b = 1, 0.61 at 64, 0.27 for a trainer at 30 %, 0.71 for both; this gives 0.71. That of
        prefill, and of trainers at other shares, is assumed (`PREFILL_ACTIVITY`, `TRAINER_ACTIVITY`).
        """
        if prefilling:
            inference = PREFILL_ACTIVITY
        elif running:
            inference = LEAST_ACTIVITY + (MOST_ACTIVITY - LEAST_ACTIVITY) * min(1.0, (running - 1) / 63)
        else:
            inference = IDLE_ACTIVITY
        return 1 - (1 - inference) * (1 - self.trainer_activity) if training else inference


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
    return Hardware(
        decode=tuple(
            tuple(base_s + per_sequence_s * b + per_train_s * train for b in range(most + 1))
            for train in range(most_train + 1)
        ),
        prefill=(prefill_s_per_token,) * (most_train + 1),
        micro_step=tuple(micro_step_s * max(1, train) for train in range(most_train + 1)),
        step_tokens=step_tokens,
    )


def measured(sharing: Sharing = "30", slower: float = 1.0, most_train: int = 16) -> Hardware:
    """An H200 with an 8B model, `slower` times slower: measured decode steps and prefills between their grid points.

    The trainer's step is the least-squares line over B: its column is too coarse to look anything up in it.
    """
    decode = _decode_rows()
    batches = (0, *sorted({train for share, train, _ in decode if share == sharing}))
    sizes = sorted({infer for _, _, infer in decode})
    engine: FloatArray = np.interp(sizes, [n for n, _ in ENGINE_S], [step_s for _, step_s in ENGINE_S])
    alone = np.array([decode["alone", 0, infer] for infer in sizes])
    grid = {0: engine}
    for train in batches[1:]:
        grid[train] = engine + np.array([decode[sharing, train, infer] for infer in sizes]) / 1000 - alone / 1000
    return Hardware(
        decode=tuple(
            tuple(slower * value for value in _between(batches, grid, sizes, train)) for train in range(most_train + 1)
        ),
        prefill=tuple(slower * value for value in _prefill_slopes(PREFILL_ROWS[sharing], most_train)),
        micro_step=tuple(slower * value for value in _micro_steps(sharing, most_train)),
        trainer_activity=TRAINER_ACTIVITY[sharing],
    )


def _between(batches: Sequence[int], grid: dict[int, FloatArray], sizes: Sequence[int], train: int) -> list[float]:
    wanted = range(max(sizes) + 1)
    rows = np.array([np.interp(wanted, sizes, grid[batch]) for batch in batches])
    return [float(np.interp(train, batches, rows[:, b])) for b in wanted]


def _decode_rows() -> dict[tuple[str, int, int], float]:
    """Milliseconds; a point that lies below its lighter neighbours is none of the hardware, and is left to them."""
    rows = {
        (row["sm_share"], int(row["train_batch"]), int(row["infer_batch"])): float(row["decode_ms_p50"])
        for row in _table("h200_decode.csv")
    }
    for (share, train, infer), value in rows.items():
        peers = [rows[share, train, b] for (s, t, b) in rows if (s, t) == (share, train)]
        if value < 0.6 * median(peers) and infer > 1:
            rows[share, train, infer] = median(peers)
    return rows


def _prefill_slopes(share: str, most_train: int) -> list[float]:
    """Seconds a prompt token, by B: the least-squares slope over prompts of 512 tokens and more."""
    points: dict[int, list[tuple[float, float]]] = {}
    for row in _table("h200_prefill.csv"):
        if row["sm_share"] in ("alone", share) and int(row["prompt_tokens"]) >= 512:
            point = (float(row["prompt_tokens"]), float(row["prefill_ms_p50"]))
            points.setdefault(int(row["train_batch"]), []).append(point)
    slopes = {train: _straight(rows)[0] for train, rows in points.items()}
    known = sorted(slopes)
    return [float(np.interp(train, known, [slopes[k] for k in known])) / 1000 for train in range(most_train + 1)]


def _micro_steps(share: str, most_train: int) -> list[float]:
    """Seconds of a micro-step of B samples, by B."""
    told = [
        (int(row["train_batch"]), float(row["train_step_ms"]) / 1000)
        for row in _table("h200_decode.csv")
        if row["sm_share"] == share and row["train_step_ms"] and not (share == "30" and row["train_batch"] == "16")
    ]
    slope, base = _straight(told)
    return [max(0.0, base) + slope * max(1, train) for train in range(most_train + 1)]


def _straight(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, value at 0) of the least-squares line."""
    slope, base = np.polyfit([x for x, _ in points], [y for _, y in points], 1)
    return float(slope), float(base)


def _table(name: str) -> list[dict[str, str]]:
    file = files("collm_tools.simulator") / "data" / name
    try:
        return list(csv.DictReader(file.read_text().splitlines()))
    except FileNotFoundError as error:
        raise DataError(f"{name} is not installed", field="hardware") from error
