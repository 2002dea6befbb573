"""One view of the cell, made of what was read: pure, so that the page can be looked at without a cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from collm_common.lookback import WINDOW_S, Queue, latest, throughput
from collm_common.messages import AdapterPublished, AnyMessage, Event, InferenceReport, TrainReport, kind
from collm_common.types import Slo
from collm_common.wording import event_line
from collm_dispatcher.cell import Adapter, Member
from collm_dispatcher.ingress.page.figures import Figures
from collm_dispatcher.ingress.page.fits import fit, measured
from collm_dispatcher.ingress.page.jobs import jobs
from collm_dispatcher.ingress.page.lanes import lanes
from collm_dispatcher.ingress.page.view import (
    AdapterView,
    Curve,
    News,
    ReplicaView,
    StreamView,
    Version,
    View,
)

TIMELINE_S = 900.0
LEAST_S = 120.0
RATE_S = 300.0
BIN_S = 5.0
FRESH_S = 10.0
NEWS = 20


class Known(Struct):
    """What a view is made of; messages are oldest first. `trains` maps a job to its adapter."""

    members: Mapping[str, Member]
    adapters: Mapping[str, Adapter]
    queues: Sequence[Queue]
    subflows: Mapping[str, int]
    telemetry: Sequence[AnyMessage]
    events: Sequence[AnyMessage]
    trains: dict[str, str]
    classes: Mapping[str, Slo]
    figures: Mapping[tuple[str, str], Figures]


def summary(known: Known, now_s: float) -> View:
    """The whole page at `now_s`."""
    reports = [message for message in known.telemetry if isinstance(message, InferenceReport)]
    steps = [message for message in known.telemetry if isinstance(message, TrainReport)]
    events = [message for message in known.events if isinstance(message, Event)]
    last = latest(reports)
    points = measured(reports)
    infos = [member.info for member in known.members.values()]
    since_s = begin(events, now_s)
    return View(
        time_s=now_s,
        since_s=since_s,
        models=sorted({info.model for info in infos}),
        tokens_per_s=throughput(reports, now_s),
        tokens=rate(reports, now_s),
        replicas=[_replica(member, last, reports, known.subflows, now_s) for member in known.members.values()],
        streams=streams(known),
        adapters=[_adapter(name, adapter, last, events) for name, adapter in sorted(known.adapters.items())],
        jobs=jobs(events, steps, known.trains),
        lanes=lanes(infos, events, since_s, now_s),
        fits=[
            fit(id_, member.latency, points.get(id_, []), member.info.infer_batch_max)
            for id_, member in known.members.items()
        ],
        news=[News(event.time_s, kind(event), event_line(event)) for event in events[: -NEWS - 1 : -1]],
    )


def begin(events: Sequence[Event], now_s: float) -> float:
    """Where the timeline begins: at the oldest event that is kept, within bounds."""
    oldest_s = events[0].time_s if events else now_s
    return min(now_s - LEAST_S, max(now_s - TIMELINE_S, oldest_s))


def rate(reports: Iterable[InferenceReport], now_s: float) -> Curve:
    """Output tokens per second of all replicas in whole bins up to `now_s`; a bin's time is its end."""
    end = int(now_s // BIN_S)
    tokens: dict[int, int] = defaultdict(int)
    for report in reports:
        tokens[int(report.time_s // BIN_S)] += report.output_tokens
    first = max(end - int(RATE_S / BIN_S), min(tokens, default=end))
    return [((number + 1) * BIN_S, tokens[number] / BIN_S) for number in range(first, end)]


def streams(known: Known) -> list[StreamView]:
    """Those of the cell, then figures of this ingress that belong to none of them."""
    left = dict(known.figures)
    found = []
    for queue in known.queues:
        own = left.pop((queue.model, queue.slo), Figures())
        found.append(_stream(queue.model, queue.slo, known.classes.get(queue.slo), queue.length, own))
    return found + [_stream(model, name, None, None, own) for (model, name), own in sorted(left.items())]


def _stream(model: str, name: str, limits: Slo | None, waiting: int | None, own: Figures) -> StreamView:
    if not own.offered:
        return StreamView(model, name, limits, waiting)
    return StreamView(model, name, limits, waiting, own.offered, own.attainment, own.goodput_tokens)


def _replica(
    member: Member,
    last: Mapping[str, InferenceReport],
    reports: Sequence[InferenceReport],
    subflows: Mapping[str, int],
    now_s: float,
) -> ReplicaView:
    info = member.info
    own = [report for report in reports if report.replica == info.id]
    said = last.get(info.id)
    fresh = said if said is not None and now_s - said.time_s <= FRESH_S else None
    return ReplicaView(
        id=info.id,
        model=info.model,
        state=info.state,
        ready=info.ready,
        alive=info.alive,
        quality=info.quality,
        job=info.job,
        limit_max=info.infer_batch_max,
        sent=subflows.get(info.id, 0),
        reported_s=said.time_s if said else None,
        utilisation=fresh.utilisation if fresh else None,
        running=fresh.running if fresh else None,
        mean_batch=fresh.mean_batch if fresh else None,
        limit=fresh.limit if fresh else None,
        train=fresh.train_batch if fresh else None,
        sm_share=member.sizes.sm_share if member.sizes and member.train_batch else None,
        memory_bytes=fresh.memory_bytes if fresh else None,
        tokens_per_s=throughput((report for report in own if now_s - report.time_s <= WINDOW_S), now_s),
        versions=fresh.versions if fresh else {},
        load=[(report.time_s, report.utilisation) for report in own if now_s - report.time_s <= RATE_S],
    )


def _adapter(name: str, adapter: Adapter, last: Mapping[str, InferenceReport], events: Iterable[Event]) -> AdapterView:
    holders: dict[str, list[str]] = defaultdict(list)
    for id_, report in sorted(last.items()):
        if name in report.versions:
            holders[report.versions[name]].append(id_)
    published = [
        Version(event.version, event.time_s, event.before, event.after)
        for event in events
        if isinstance(event, AdapterPublished) and event.name == name
    ]
    return AdapterView(name, adapter.model, adapter.version, published, dict(holders))
