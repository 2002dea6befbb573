"""The demo's report: figures from records and events, and the conditions that they must meet. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from collm_common.messages import (
    AdapterPublished,
    Aggregated,
    Event,
    InferenceReport,
    JobChanged,
    StateChanged,
    UpdateUploaded,
)
from collm_tools.load.metrics import Requests, Summary

MIN_ROUNDS, MIN_CLIENTS, MIN_SNAPSHOTS, MIN_PUBLISHED = 2, 3, 6, 2
MIN_GAIN = 0.05


class Federated(Struct, frozen=True):
    """Jobs begun, rounds aggregated over all jobs, and different replicas that uploaded an update."""

    jobs: int
    rounds: int
    clients: int


class AdapterSwaps(Struct, frozen=True):
    """Summed over the engines: local snapshots and published versions taken into service."""

    snapshots: int
    published: int


class CrossEntropy(Struct, frozen=True):
    """Token-weighted mean over the same held-out answers (nats)."""

    before: float | None
    after: float | None
    heldout: int = 0


class Report(Struct, frozen=True):
    """out/demo/report.json."""

    requests: Requests
    goodput_tokens_per_s: float
    q_goodput: float | None
    slo_attainment: float
    federated: Federated
    adapter_swaps: AdapterSwaps
    cross_entropy: CrossEntropy
    base_weights_unchanged: bool
    state_changes: int
    published_cross_entropies: tuple[float, ...]
    duration_s: float
    load: Summary


def federated(events: Sequence[Event]) -> Federated:
    """Counted from what happened, not from what was planned."""
    return Federated(
        jobs=len({event.job for event in events if isinstance(event, JobChanged)}),
        rounds=len({(event.job, event.round) for event in events if isinstance(event, Aggregated)}),
        clients=len({event.replica for event in events if isinstance(event, UpdateUploaded)}),
    )


def adapter_swaps(reports: Sequence[InferenceReport]) -> AdapterSwaps:
    """Counters start again at 0 with each engine process; what an earlier process had counted is kept."""
    ordered = sorted(reports, key=lambda report: report.time_s)
    replicas = {report.replica for report in ordered}
    lanes = [[report for report in ordered if report.replica == replica] for replica in replicas]
    return AdapterSwaps(
        snapshots=sum(total(report.snapshots for report in lane) for lane in lanes),
        published=sum(total(report.published for report in lane) for lane in lanes),
    )


def total(counter: Iterable[int]) -> int:
    """What a counter that may restart at 0 has counted in all."""
    counted, last = 0, 0
    for value in counter:
        counted += value - last if value >= last else value
        last = value
    return counted


def unchanged(before: Mapping[str, str], after: Mapping[str, str]) -> bool:
    """Whether every replica has the weights it started with, and all have the same. Unknown digests are no proof."""
    digests = {*before.values(), *after.values()}
    return bool(before) and before.keys() <= after.keys() and len(digests) == 1 and "" not in digests


def build(
    load: Summary,
    events: Sequence[Event],
    reports: Sequence[InferenceReport],
    cross_entropy: CrossEntropy,
    base_weights_unchanged: bool,
    duration_s: float,
) -> Report:
    """Put everything together."""
    return Report(
        requests=load.requests,
        goodput_tokens_per_s=load.goodput_tokens_per_s,
        q_goodput=load.q_goodput,
        slo_attainment=load.slo_attainment,
        federated=federated(events),
        adapter_swaps=adapter_swaps(reports),
        cross_entropy=cross_entropy,
        base_weights_unchanged=base_weights_unchanged,
        state_changes=sum(isinstance(event, StateChanged) for event in events),
        published_cross_entropies=tuple(
            event.after for event in events if isinstance(event, AdapterPublished) and event.after is not None
        ),
        duration_s=duration_s,
        load=load,
    )


def shortcomings(report: Report) -> list[str]:
    """Every condition that does not hold, in words; empty for a demo that shows what it should."""
    ask, jobs, swaps, quality = report.requests, report.federated, report.adapter_swaps, report.cross_entropy
    before, after = quality.before, quality.after
    checks = [
        (ask.offered > 0, "no request was offered"),
        (ask.offered == ask.completed + ask.rejected + ask.failed, "offered is not completed + rejected + failed"),
        (ask.failed == 0, f"{ask.failed} requests failed: {report.load.errors}"),
        (jobs.rounds >= MIN_ROUNDS, f"{jobs.rounds} federated rounds, wanted {MIN_ROUNDS}"),
        (jobs.clients >= MIN_CLIENTS, f"{jobs.clients} clients took part, wanted {MIN_CLIENTS}"),
        (swaps.snapshots >= MIN_SNAPSHOTS, f"{swaps.snapshots} snapshots were swapped in, wanted {MIN_SNAPSHOTS}"),
        (swaps.published >= MIN_PUBLISHED, f"{swaps.published} published versions swapped in, wanted {MIN_PUBLISHED}"),
        (before is not None and after is not None, "held-out answers were not scored both before and after"),
        (
            before is None or after is None or after <= before * (1 - MIN_GAIN),
            f"held-out cross-entropy went from {before} to {after}, wanted {MIN_GAIN:.0%} less",
        ),
        (report.base_weights_unchanged, "base weights changed, or a replica's could not be checked"),
    ]
    return [text for holds, text in checks if not holds]
