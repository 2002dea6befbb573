"""A day of load: whole slices of a trace laid over one another along a daily profile.

No arrival is left out and no time is stretched, so gaps inside a slice are those of the trace; how many slices lie over
one another follows the profile.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from collm_common.types import Slo
from collm_tools.load.traces import read_trace
from collm_tools.load.traffic import Arrival
from collm_tools.simulator import likeness
from collm_tools.simulator.hardware import Hardware

DATA = Path(__file__).parent / "data"
DAY_MINUTES = 600.0
SLICES = 120

PROFILE = (
    (0, 0.40),
    (60, 0.75),
    (90, 1.0),
    (180, 0.60),
    (210, 0.20),
    (240, 0.88),
    (270, 1.0),
    (360, 0.50),
    (390, 0.30),
    (400, 0.12),
    (440, 0.008),
    (450, 0.12),
    (500, 0.50),
    (530, 1.0),
    (580, 0.70),
)
"""(from which minute of ten hours, share of the top level): a lull under 1 % of it, and a surge of 440 % at 240."""

DIP_MINUTES = (400, 500)
FULL_LOAD = 1.1
"""Share of the ideal mode's capacity that the top level offers at scale 4; scale 1 is a quarter of it."""


class Workload(Struct, frozen=True):
    """A trace with its objective. `seconds` is how long the trace is."""

    name: str
    arrivals: tuple[Arrival, ...]
    slo: Slo
    seconds: float

    @property
    def rate(self) -> float:
        """Requests a second, over the whole trace."""
        return len(self.arrivals) / self.seconds

    @property
    def mean_prompt(self) -> float:
        """Tokens."""
        return sum(a.prompt_tokens or 1 for a in self.arrivals) / len(self.arrivals)

    @property
    def mean_output(self) -> float:
        """Tokens."""
        return sum(a.output_tokens or 1 for a in self.arrivals) / len(self.arrivals)

    @property
    def mean_context(self) -> float:
        """Tokens before a token that is decoded: the prompt, and half of the answer, over all tokens answered."""
        lengths = [(a.prompt_tokens or 1, a.output_tokens or 1) for a in self.arrivals]
        return sum((prompt + output / 2) * output for prompt, output in lengths) / sum(o for _, o in lengths)


SLOS = {
    "code": Slo("code", e2e_s=0.5, late="reject"),
    "conv": Slo("conv", ttft_s=0.5, tpot_s=0.05, late="reject"),
}
"""Two readings of "0.5 s a request": to the last token where answers are short, to the first where they are long."""

FILES = {"code": "AzureLLMInferenceTrace_code.csv", "conv": "AzureLLMInferenceTrace_conv.csv"}


def workload(name: str, traces: Path | None, seed: int = 0) -> Workload:
    """Azure's hour of that name: the trace itself from the folder `traces`, or a likeness of it."""
    if traces is not None:
        arrivals = read_trace(traces / FILES[name])
    else:
        arrivals = likeness.play(likeness.read(DATA / f"azure_{name}.json"), seed)
    return Workload(name, tuple(arrivals), SLOS[name], arrivals[-1].at_s)


def level(minute: float) -> float:
    """The profile at a minute of the day."""
    return next(share for start, share in reversed(PROFILE) if minute >= start)


def ideal_rate(hardware: Hardware, load: Workload, most: int) -> float:
    """Requests a second that a replica carries in ideal mode: lambda = b*/S(b*), S(b) = b prefill + L T(b).

    While one of b requests is answered, b others come, and the prefill of each holds all of them up.
    """
    prefill_s, output, slo = hardware.prefill[0] * load.mean_prompt, load.mean_output, load.slo
    rates = [0.0]
    for b in range(1, min(most, hardware.most) + 1):
        service_s = b * prefill_s + output * hardware.decode[0][b]
        token_s = service_s / output
        if (slo.e2e_s is None or service_s <= slo.e2e_s) and (slo.tpot_s is None or token_s <= slo.tpot_s):
            rates.append(b / service_s)
    return max(rates)


def day(load: Workload, top_rate: float, day_s: float, seed: int = 0) -> Iterator[Arrival]:
    """Arrivals of one day of `day_s` seconds whose busiest level is `top_rate` requests a second."""
    draw = random.Random(f"{seed} {load.name}")
    times = [arrival.at_s for arrival in load.arrivals]
    width_s = day_s / SLICES
    for index in range(SLICES):
        copies = level(DAY_MINUTES * index / SLICES) * top_rate / load.rate
        count = int(copies) + (draw.random() < copies % 1)
        found: list[Arrival] = []
        for _ in range(count):
            found += _slice(load.arrivals, times, draw.uniform(0, load.seconds - width_s), width_s, index * width_s)
        yield from sorted(found, key=lambda arrival: arrival.at_s)


def _slice(
    arrivals: Sequence[Arrival], times: Sequence[float], start_s: float, width_s: float, to_s: float
) -> list[Arrival]:
    first, last = bisect_left(times, start_s), bisect_left(times, start_s + width_s)
    return [Arrival(a.at_s - start_s + to_s, a.prompt_tokens, a.output_tokens) for a in arrivals[first:last]]
