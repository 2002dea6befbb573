"""A snapshot as tables for a terminal."""

from __future__ import annotations

import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from collm_tools.status.snapshot import ReplicaRow, Snapshot
from collm_tools.story import event_line

COLOURS = {"serving": "green", "idle": "cyan", "combined": "magenta"}
COLUMNS = (
    "replica",
    "model",
    "state",
    "ready",
    "running",
    "mean b",
    "limit b",
    "train B",
    "queue",
    "busy",
    "Q",
    "adapters",
)


def render(snapshot: Snapshot) -> RenderableType:
    """Replicas, queues, serving figures, running jobs and the last events."""
    parts: list[RenderableType] = [replicas(snapshot), Text(serving_line(snapshot))]
    parts += [Text(event_line(job)) for job in snapshot.jobs]
    for event in snapshot.events:
        at = time.strftime("%H:%M:%S", time.localtime(event.time_s))
        parts.append(Text(f"{at} {event_line(event)}", style="dim"))
    return Group(*parts)


def replicas(snapshot: Snapshot) -> Table:
    """One row a replica."""
    table = Table(*COLUMNS)
    for row in snapshot.replicas:
        table.add_row(*cells(row))
    return table


def cells(row: ReplicaRow) -> list[RenderableType]:
    """In the order of COLUMNS; `-` where there is no report."""
    info, report = row.info, row.report
    ready = "yes" if info.ready and info.alive else ("no" if info.alive else "dead")
    head: list[RenderableType] = [info.id, info.model, Text(info.state, style=COLOURS[info.state]), ready]
    if report is None:
        return [*head, "-", "-", "-", "-", str(row.subflow), "-", f"{info.quality:.3f}", "-"]
    versions = ", ".join(f"{name}@v{version}" for name, version in sorted(report.versions.items()))
    sizes = [str(report.running), f"{report.mean_batch:.1f}", str(report.limit), str(report.train_batch)]
    return [*head, *sizes, str(row.subflow), f"{report.utilisation:.0%}", f"{info.quality:.3f}", versions or "base"]


def serving_line(snapshot: Snapshot) -> str:
    """Queues and serving figures in one line."""
    parts = [f"{queue.model}|{queue.slo}: {queue.length} waiting" for queue in snapshot.queues]
    parts.append(f"{snapshot.tokens_per_s:.1f} tokens/s")
    parts += [f"{name.removeprefix('collm:')} {value:.4g}" for name, value in snapshot.figures.items()]
    return "; ".join(parts)
