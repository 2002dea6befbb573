"""What a simulated run amounts to, summed up as requests end; nothing grows with their number."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from msgspec import Struct

from collm_tools.simulator.request import SimRequest


class Figures(Struct, frozen=True):
    """Rates are per second of `duration_s`, the offered time; every offered request counts.

    goodput: output tokens of answers inside their SLO; Q-goodput weighs each by 1 / cross-entropy.
    """

    offered: int
    completed: int
    refused: int
    met: int
    duration_s: float
    goodput: float
    q_goodput: float
    attainment: float
    mean_e2e_s: float
    mean_ttft_s: float
    better_than_one: float


class Bin(Struct):
    """A stretch of the run, by arrival."""

    offered: int = 0
    met: int = 0
    tokens: int = 0
    q_tokens: float = 0.0


@dataclass
class Tally:
    """Sees each request once. `bin_s` is the resolution of `bins` in time; qualities are kept by `QUALITY_BINS`."""

    bin_s: float = 60.0
    offered: int = 0
    completed: int = 0
    met: int = 0
    tokens: int = 0
    q_tokens: float = 0.0
    e2e_s: float = 0.0
    ttft_s: float = 0.0
    bins: dict[int, Bin] = field(default_factory=dict)
    qualities: dict[int, int] = field(default_factory=dict)
    last_s: float = 0.0

    QUALITY_STEP = 0.02

    def __call__(self, request: SimRequest) -> None:
        """One request has ended."""
        self.offered += 1
        index = int(request.arrival_s / self.bin_s)
        row = self.bins.get(index)
        if row is None:
            row = self.bins[index] = Bin()
        row.offered += 1
        if request.outcome != "completed":
            return
        self.completed += 1
        self.last_s = max(self.last_s, request.end_s)
        self.e2e_s += request.end_s - request.arrival_s
        self.ttft_s += request.first_s - request.arrival_s
        quality = 1 / request.cross_entropy
        step = int(quality / self.QUALITY_STEP)
        self.qualities[step] = self.qualities.get(step, 0) + 1
        if request.met:
            tokens = request.output_tokens
            self.met += 1
            self.tokens += tokens
            self.q_tokens += tokens * quality
            row.met += 1
            row.tokens += tokens
            row.q_tokens += tokens * quality

    def figures(self, duration_s: float) -> Figures:
        """Over the offered time, or until the last answer if nothing is said."""
        span_s = duration_s if duration_s < inf else max(self.last_s, 1e-9)
        completed = max(1, self.completed)
        better = sum(count for step, count in self.qualities.items() if step * self.QUALITY_STEP >= 1)
        return Figures(
            offered=self.offered,
            completed=self.completed,
            refused=self.offered - self.completed,
            met=self.met,
            duration_s=span_s,
            goodput=self.tokens / span_s,
            q_goodput=self.q_tokens / span_s,
            attainment=self.met / max(1, self.offered),
            mean_e2e_s=self.e2e_s / completed,
            mean_ttft_s=self.ttft_s / completed,
            better_than_one=better / completed,
        )
