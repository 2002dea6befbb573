"""From arrivals to the requests of one simulated run."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import exp

from msgspec import structs

from collm_common.types import Slo
from collm_tools.load.traffic import Arrival
from collm_tools.simulator.request import SimRequest


def strict(slo: Slo) -> Slo:
    """The same limits, and no answer wanted past them: what cannot be in time only takes its place from others."""
    return structs.replace(slo, late="reject")


def filled(arrivals: Iterable[Arrival], prompt_tokens: int, output_tokens: int) -> list[Arrival]:
    """Lengths for those of which the process says none."""
    return [
        replace(a, prompt_tokens=a.prompt_tokens or prompt_tokens, output_tokens=a.output_tokens or output_tokens)
        for a in arrivals
    ]


def offers(
    arrivals: Iterable[Arrival], slo: Slo, adapters: int = 1, seed: int = 0, max_tokens: int = 1024, spread: float = 0.0
) -> Iterator[SimRequest]:
    """One request for each arrival, made when it comes; adapters are drawn evenly.

    The deadline is the one the ingress would stamp; `spread` is that of the log of their difficulty.
    """
    draw = random.Random(seed)
    limits = [limit for limit in (slo.ttft_s, slo.e2e_s) if limit is not None]
    for number, arrival in enumerate(arrivals):
        output = max(1, arrival.output_tokens or 1)
        asked = max(output, max_tokens)
        yield SimRequest(
            number=number,
            arrival_s=arrival.at_s,
            deadline_s=slo.deadline(arrival.at_s, asked),
            prompt_tokens=max(1, arrival.prompt_tokens or 1),
            output_tokens=output,
            slo=slo,
            adapter=draw.randrange(adapters),
            max_tokens=asked,
            difficulty=exp(draw.gauss(0.0, spread)) if spread else 1.0,
            wanted_s=arrival.at_s + min(limits) if limits and slo.late == "reject" else float("inf"),
        )
