"""The demo's picture: arrivals, states, batch sizes, goodput and cross-entropy over one time axis."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from collm_common.messages import AdapterPublished, Event, InferenceReport, TrainReport
from collm_common.types import Slo
from collm_tools.load.client import RequestRecord
from collm_tools.load.picture import binned

STATE_COLOURS = {"serving": "tab:green", "idle": "lightgrey", "combined": "tab:purple"}
BIN_S = 5.0
MEAN_OVER = 8
MOST_LABELS = 8


def spans(reports: Sequence[InferenceReport], start_s: float) -> dict[str, list[tuple[str, float, float]]]:
    """Per replica, stretches (state, from, to) in seconds from `start_s`, merged while the state stays."""
    lanes: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for report in sorted(reports, key=lambda report: report.time_s):
        at_s, lane = report.time_s - start_s, lanes[report.replica]
        if lane:
            state, begin_s, _ = lane[-1]
            lane[-1] = (state, begin_s, at_s)
        if not lane or lane[-1][0] != report.state.value:
            lane.append((report.state.value, at_s, at_s))
    return dict(sorted(lanes.items()))


def moving_mean(points: Sequence[tuple[float, float]], over: int = MEAN_OVER) -> list[tuple[float, float]]:
    """Each point with the mean of it and those before it, at most `over` in all."""
    return [
        (at, sum(value for _, value in window) / len(window))
        for index, (at, _) in enumerate(points)
        if (window := points[max(0, index + 1 - over) : index + 1])
    ]


def draw(
    path: Path,
    start_s: float,
    slo: Slo,
    records: Sequence[RequestRecord],
    events: Sequence[Event],
    reports: Sequence[InferenceReport],
    training: Sequence[TrainReport],
) -> None:
    """Write the PNG. `start_s` (Unix seconds) is time 0; `records` are those of the load."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 13), layout="constrained")
    axes = figure.subplots(5, 1, sharex=True, height_ratios=[2, 2, 3, 2, 3])
    lanes = spans(reports, start_s)
    _arrivals(axes[0], start_s, records)
    _states(axes[1], lanes)
    _batches(axes[2], start_s, reports, list(lanes))
    _goodput(axes[3], start_s, slo, records)
    _quality(axes[4], start_s, records, events, training)
    for axis in axes:
        for event in events:
            if isinstance(event, AdapterPublished):
                axis.axvline(event.time_s - start_s, color="tab:red", linewidth=0.8, linestyle=":")
    axes[-1].set_xlabel("seconds (dotted: a new adapter version is published)")
    axes[0].set_title("CoLLM: serve, fall idle, fine-tune together, serve better")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _arrivals(axis: Any, start_s: float, records: Sequence[RequestRecord]) -> None:
    times = [record.sent_s - start_s for record in records]
    edges, rates = binned([(at_s, 1.0) for at_s in times], BIN_S, max(times, default=0.0))
    axis.bar(edges, rates, width=BIN_S, align="edge", color="tab:blue")
    axis.set_ylabel("arrivals/s")


def _states(axis: Any, lanes: dict[str, list[tuple[str, float, float]]]) -> None:
    for row, stretches in enumerate(lanes.values()):
        for state, begin_s, end_s in stretches:
            axis.barh(row, end_s - begin_s, left=begin_s, color=STATE_COLOURS[state], height=0.8)
    axis.set_yticks(range(len(lanes)), list(lanes))
    axis.invert_yaxis()
    for state, colour in STATE_COLOURS.items():
        axis.barh(0, 0, color=colour, label=state)
    axis.set_ylabel("state")
    _legend_above(axis)


def _batches(axis: Any, start_s: float, reports: Sequence[InferenceReport], replicas: Sequence[str]) -> None:
    for index, replica in enumerate(replicas):
        lane = [report for report in reports if report.replica == replica]
        times, colour = [report.time_s - start_s for report in lane], f"C{index}"
        axis.plot(times, [report.mean_batch for report in lane], color=colour, label=replica)
        axis.step(times, [report.limit for report in lane], color=colour, linestyle="--", where="post")
        axis.step(times, [report.train_batch for report in lane], color=colour, linestyle=":", where="post")
    for label, line in (("running", "-"), ("limit b", "--"), ("training B", ":")):
        axis.plot([], [], color="black", linestyle=line, label=label)
    axis.set_ylabel("batch sizes")
    _legend_above(axis)


def _legend_above(axis: Any) -> None:
    """Where it hides nothing."""
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize="small", ncols=MOST_LABELS, borderaxespad=0.1)


def _goodput(axis: Any, start_s: float, slo: Slo, records: Sequence[RequestRecord]) -> None:
    good = [(r.sent_s - start_s + (r.e2e_s or 0.0), float(r.output_tokens)) for r in records if r.met(slo)]
    edges, rates = binned(good, BIN_S, max((at_s for at_s, _ in good), default=0.0))
    axis.step(edges, rates, where="post", color="tab:green")
    axis.fill_between(edges, rates, step="post", color="tab:green", alpha=0.3)
    axis.set_ylabel("goodput, tokens/s")


def _quality(
    axis: Any,
    start_s: float,
    records: Sequence[RequestRecord],
    events: Sequence[Event],
    training: Sequence[TrainReport],
) -> None:
    scored = sorted((r.sent_s - start_s, r.cross_entropy) for r in records if r.cross_entropy is not None)
    if scored:
        axis.scatter(*zip(*scored, strict=True), s=8, alpha=0.5, color="tab:blue", label="reference of a request")
        axis.plot(*zip(*moving_mean(scored), strict=True), color="tab:blue", label=f"mean of {MEAN_OVER}")
    losses = sorted((report.time_s - start_s, report.loss) for report in training)
    if losses:
        axis.plot(*zip(*losses, strict=True), ".", color="tab:purple", label="training loss")
    published = [
        (e.time_s - start_s, e.after) for e in events if isinstance(e, AdapterPublished) and e.after is not None
    ]
    if published:
        axis.plot(*zip(*published, strict=True), "^", color="tab:red", label="held-out, published version")
    axis.set_ylabel("cross-entropy, nats")
    if scored or losses or published:
        axis.legend(loc="upper right", fontsize="small")
