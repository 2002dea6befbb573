"""One look at a cell: replicas, queues, adapters, jobs and serving figures, as plain data."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable

import aiohttp
from msgspec import Struct
from redis.asyncio import Redis

from collm_common.keys import Keys
from collm_common.lookback import Queue, Recent, latest, queues, subflows, throughput
from collm_common.messages import AnyMessage, Event, InferenceReport, JobChanged
from collm_common.registry import Registry
from collm_common.types import ReplicaInfo

REPORTS = 500
EVENTS = 500
SHOWN_EVENTS = 8
FIGURE = re.compile(r"^(collm:\w*(?:goodput|attainment)\w*(?<!_created))(?:\{([^}]*)\})?\s+(\S+)$", re.MULTILINE)


class ReplicaRow(Struct, frozen=True):
    """A replica with its last report (None: it has not reported lately) and the length of its subflow."""

    info: ReplicaInfo
    report: InferenceReport | None
    subflow: int


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
    reports = [m for m in await _recent(redis, keys.telemetry, REPORTS) if isinstance(m, InferenceReport)]
    events = [m for m in await _recent(redis, keys.events, EVENTS) if isinstance(m, Event)]
    last, lengths = latest(reports), await subflows(redis, keys, infos)
    open_jobs = {name.decode(errors="replace") for name in await redis.smembers(keys.jobs)}
    jobs = {event.job: event for event in events if isinstance(event, JobChanged)}
    return Snapshot(
        time_s=now_s,
        replicas=tuple(ReplicaRow(info, last.get(id_), lengths[id_]) for id_, info in infos.items()),
        queues=tuple(await queues(redis, keys)),
        jobs=tuple(event for job, event in jobs.items() if job in open_jobs),
        events=tuple(events[: -SHOWN_EVENTS - 1 : -1]),
        tokens_per_s=throughput(reports, now_s),
        figures=await _figures(url) if url else {},
    )


def figures(text: str) -> dict[str, float]:
    """Goodput and attainment from a Prometheus page; names carry their labels."""
    found = FIGURE.findall(text)
    return {f"{name}{{{labels}}}" if labels else name: float(value) for name, labels, value in found}


async def _recent(redis: Redis, key: str, keep: int) -> Iterable[AnyMessage]:
    recent = Recent(redis, key, keep)
    await recent.catch_up()
    return recent.messages


async def _figures(url: str) -> dict[str, float]:
    timeout = aiohttp.ClientTimeout(total=2)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{url.rstrip('/')}/metrics") as page:
            return figures(await page.text()) if page.status == 200 else {}
    except (aiohttp.ClientError, OSError, TimeoutError):
        return {}
