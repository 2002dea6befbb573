"""The picture of one load run. matplotlib is loaded only when a picture is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from collm_common.types import Slo
from collm_tools.load.client import RequestRecord

COLOURS = {"completed": "tab:blue", "rejected": "tab:orange", "failed": "tab:red"}


def binned(records: Sequence[tuple[float, float]], width_s: float, end_s: float) -> tuple[list[float], list[float]]:
    """Sum of values per second in bins of `width_s`: bin starts and rates."""
    edges = [index * width_s for index in range(max(1, int(end_s / width_s) + 1))]
    sums = [0.0] * len(edges)
    for at_s, value in records:
        sums[min(len(edges) - 1, max(0, int(at_s / width_s)))] += value
    return edges, [total / width_s for total in sums]


def draw(records: Sequence[RequestRecord], slo: Slo, path: Path) -> None:
    """Arrivals, goodput and latency over the run, as a PNG at `path`."""
    from matplotlib.figure import Figure

    end_s = max((record.at_s + (record.e2e_s or 0) for record in records), default=1.0)
    width_s = max(1.0, end_s / 60)
    figure = Figure(figsize=(10, 8), layout="constrained")
    rates, goodput, latency = figure.subplots(3, 1, sharex=True)
    edges, offered = binned([(r.at_s, 1) for r in records], width_s, end_s)
    rates.step(edges, offered, where="post", color="black", label="offered")
    edges, good = binned([(r.at_s, 1) for r in records if r.met(slo)], width_s, end_s)
    rates.step(edges, good, where="post", color="tab:green", label="inside the SLO")
    rates.set_ylabel("requests/s")
    ends = [(r.at_s + (r.e2e_s or 0), float(r.output_tokens)) for r in records if r.met(slo)]
    edges, tokens = binned(ends, width_s, end_s)
    goodput.step(edges, tokens, where="post", color="tab:green", label="goodput")
    goodput.set_ylabel("tokens/s")
    for outcome, colour in COLOURS.items():
        points = [(r.at_s, r.e2e_s or 0.0) for r in records if r.outcome == outcome]
        if points:
            latency.scatter(*zip(*points, strict=True), s=8, color=colour, label=outcome)
    if slo.e2e_s is not None:
        latency.axhline(slo.e2e_s, color="grey", linestyle="--", label="end-to-end limit")
    latency.set_ylabel("end to end, s")
    latency.set_xlabel("arrival, s")
    for axis in (rates, goodput, latency):
        axis.legend(loc="upper right", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
