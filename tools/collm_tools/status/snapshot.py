"""One look at a cell: replicas, queues, adapters, jobs and serving figures, as plain data."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence

import aiohttp
from msgspec import Struct
from redis.asyncio import Redis

from collm_common import messages
from collm_common.keys import Keys
from collm_common.messages import Event, InferenceReport, JobChanged
from collm_common.registry import Registry
from collm_common.streams import parse
from collm_common.types import ReplicaInfo

REPORTS = 500
EVENTS = 500
WINDOW_S = 10.0
FIGURE = re.compile(r"^(collm:\w*(?:goodput|attainment)\w*(?<!_created))(?:\{([^}]*)\})?\s+(\S+)$", re.MULTILINE)


class ReplicaRow(Struct, frozen=True):
    """A replica with its last report (None: it has not reported lately) and the length of its subflow."""

    info: ReplicaInfo
    report: InferenceReport | None
    subflow: int


class Queue(Struct, frozen=True):
    """An original request stream and how many wait in it."""

    model: str
    slo: str
    length: int


class Snapshot(Struct, frozen=True):
    """`tokens_per_s` is what all replicas put out in the last seconds; `figures` are the HTTP service's own."""

    time_s: float
    replicas: tuple[ReplicaRow, ...]
    queues: tuple[Queue, ...]
    jobs: tuple[JobChanged, ...]
    events: tuple[Event, ...]
    tokens_per_s: float
    figures: dict[str, float]


async def take(redis: Redis, keys: Keys, url: str = "") -> Snapshot:
    """Read everything once; without `url`, or if nobody answers there, `figures` is empty."""
    now_s = time.time()
    infos = await Registry(redis, keys).replicas()
    reports = [m for m in await _last(redis, keys.telemetry, REPORTS) if isinstance(m, InferenceReport)]
    events = [m for m in await _last(redis, keys.events, EVENTS) if isinstance(m, Event)]
    latest = {report.replica: report for report in reversed(reports)}
    rows = [ReplicaRow(info, latest.get(id_), await redis.xlen(keys.subflow(id_))) for id_, info in infos.items()]
    open_jobs = {name.decode() for name in await redis.smembers(keys.jobs)}
    jobs = {event.job: event for event in reversed(events) if isinstance(event, JobChanged)}
    return Snapshot(
        time_s=now_s,
        replicas=tuple(rows),
        queues=tuple(await _queues(redis, keys)),
        jobs=tuple(event for job, event in jobs.items() if job in open_jobs),
        events=tuple(events[:8]),
        tokens_per_s=throughput(reports, now_s),
        figures=await _figures(url) if url else {},
    )


def throughput(reports: Iterable[InferenceReport], now_s: float, window_s: float = WINDOW_S) -> float:
    """Output tokens per second of all replicas over the last `window_s`."""
    return sum(report.output_tokens for report in reports if now_s - report.time_s <= window_s) / window_s


def figures(text: str) -> dict[str, float]:
    """Goodput and attainment from a Prometheus page; names carry their labels."""
    found = FIGURE.findall(text)
    return {f"{name}{{{labels}}}" if labels else name: float(value) for name, labels, value in found}


async def _last(redis: Redis, key: str, count: int) -> Sequence[messages.AnyMessage]:
    """The last messages of a stream, newest first."""
    return [messages.decode(entry.data) for entry in parse(key, await redis.xrevrange(key, count=count))]


async def _queues(redis: Redis, keys: Keys) -> list[Queue]:
    names = sorted(name.decode() for name in await redis.smembers(keys.streams))
    pairs = [name.rpartition("|")[::2] for name in names]
    return [Queue(model, slo, await redis.xlen(keys.requests(model, slo))) for model, slo in pairs]


async def _figures(url: str) -> dict[str, float]:
    timeout = aiohttp.ClientTimeout(total=2)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url.rstrip('/')}/metrics") as page:
            return figures(await page.text()) if page.status == 200 else {}
    except (aiohttp.ClientError, OSError, TimeoutError):
        return {}
