"""Federated jobs as their events and reports tell them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from collm_common.messages import (
    AdapterPublished,
    Aggregated,
    Evaluated,
    Event,
    JobChanged,
    TrainReport,
    UpdateUploaded,
)
from collm_dispatcher.ingress.page.view import Curve, JobView, RoundView

SHOWN = 4
POINTS = 120


def jobs(events: Sequence[Event], reports: Iterable[TrainReport], adapters: dict[str, str]) -> list[JobView]:
    """The last ones, newest first; `adapters` maps a job to what it trains where that is known from elsewhere."""
    own: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        if isinstance(event, JobChanged | UpdateUploaded | Aggregated | Evaluated):
            own[event.job].append(event)
    published = {(event.name, event.version) for event in events if isinstance(event, AdapterPublished)}
    started = [job for job, said in own.items() if any(isinstance(event, JobChanged) for event in said)]
    shown = started[-SHOWN:][::-1]
    curves = _curves(reports, set(shown))
    return [_job(job, own[job], curves.get(job, {}), adapters.get(job, ""), published) for job in shown]


def thinned(curve: Curve, most: int = POINTS) -> Curve:
    """At most about `most` points, each the mean of as many neighbours."""
    size = -(-len(curve) // most)
    parts = [curve[start : start + size] for start in range(0, len(curve), size or 1)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _curves(reports: Iterable[TrainReport], wanted: set[str]) -> dict[str, dict[str, Curve]]:
    found: dict[str, dict[str, Curve]] = defaultdict(lambda: defaultdict(list))
    for report in reports:
        if report.job in wanted:
            found[report.job][report.replica].append((report.time_s, report.loss))
    return {job: {id_: thinned(curve) for id_, curve in sorted(lines.items())} for job, lines in found.items()}


def _job(
    id_: str, events: Sequence[Event], losses: dict[str, Curve], adapter: str, published: set[tuple[str, int]]
) -> JobView:
    changes = [event for event in events if isinstance(event, JobChanged)]
    last = changes[-1]
    made = next((event.adapter for event in events if isinstance(event, Aggregated)), adapter)
    rounds = _rounds(events, {version for name, version in published if name == made})
    uploaded = {client for round_ in rounds for client in round_.uploads}
    return JobView(
        id=id_,
        adapter=made,
        status=last.status,
        reason=last.reason,
        round=last.round,
        started_s=changes[0].time_s,
        changed_s=last.time_s,
        clients=sorted(uploaded | losses.keys()),
        losses=losses or _by_round(events),
        rounds=rounds,
    )


def _rounds(events: Sequence[Event], published: set[int]) -> list[RoundView]:
    numbers = sorted({e.round for e in events if isinstance(e, UpdateUploaded | Aggregated)})
    found = []
    for number in numbers:
        uploads = {e.replica: e.loss for e in events if isinstance(e, UpdateUploaded) and e.round == number}
        made = [e.version for e in events if isinstance(e, Aggregated) and e.round == number]
        version = made[-1] if made else None
        judged = [e for e in events if isinstance(e, Evaluated) and e.version == version]
        found.append(RoundView(number, uploads, version, _held_out(judged), version in published))
    return found


def _held_out(judged: Sequence[Evaluated]) -> float | None:
    """Token-weighted, over the last word of each client."""
    last = {event.replica: event.quality for event in judged}
    tokens = sum(quality.tokens for quality in last.values())
    return sum(q.cross_entropy * q.tokens for q in last.values()) / tokens if tokens else None


def _by_round(events: Sequence[Event]) -> dict[str, Curve]:
    """For a job whose step reports are no longer kept: the mean loss of each round."""
    found: dict[str, Curve] = defaultdict(list)
    for event in events:
        if isinstance(event, UpdateUploaded):
            found[event.replica].append((event.time_s, event.loss))
    return dict(sorted(found.items()))
