"""A snapshot as tables for a terminal."""

from __future__ import annotations

import time

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from collm_common.wording import event_line
from collm_tools.status.snapshot import ReplicaRow, Snapshot

COLOURS = {"serving": "green", "idle": "cyan", "combined": "magenta"}
COLUMNS = ("replica", "state", "ready", "running", "mean\nb", "limit\nb", "train\nB", "queue", "busy", "Q")


def render(snapshot: Snapshot) -> RenderableType:
    """Replicas, queues, serving figures, running jobs and the last events."""
    models = sorted({row.info.model for row in snapshot.replicas})
    parts: list[RenderableType] = [replicas(snapshot, model) for model in models]
    parts += [Text(line) for line in (*adapter_lines(snapshot), *serving_lines(snapshot))]
    parts += [Text(event_line(job)) for job in snapshot.jobs]
    for event in snapshot.events:
        at = time.strftime("%H:%M:%S", time.localtime(event.time_s))
        parts.append(Text(f"{at} {event_line(event)}", style="dim"))
    return Group(*parts)


def replicas(snapshot: Snapshot, model: str) -> Table:
    """One row a replica of `model`; it fits into 80 columns."""
    rows = Table(title=Text(model), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in COLUMNS:
        rows.add_column(name, no_wrap=True)
    for row in snapshot.replicas:
        if row.info.model == model:
            rows.add_row(*cells(row))
    return rows


def cells(row: ReplicaRow) -> list[RenderableType]:
    """In the order of COLUMNS; `-` where there is no report."""
    info, report = row.info, row.report
    ready = "yes" if info.ready and info.alive else ("no" if info.alive else "dead")
    head: list[RenderableType] = [info.id, Text(info.state, style=COLOURS[info.state]), ready]
    if report is None:
        return [*head, "-", "-", "-", "-", str(row.subflow), "-", f"{info.quality:.3f}"]
    sizes = [str(report.running), f"{report.mean_batch:.1f}", str(report.limit), str(report.train_batch)]
    return [*head, *sizes, str(row.subflow), f"{report.utilisation:.0%}", f"{info.quality:.3f}"]


def adapter_lines(snapshot: Snapshot) -> list[str]:
    """Who serves which version of an adapter."""
    holders: dict[str, list[str]] = {}
    for row in snapshot.replicas:
        for name, version in row.report.versions.items() if row.report else ():
            holders.setdefault(f"{name}@v{version}", []).append(row.info.id)
    return [f"adapter {name} on {', '.join(ids)}" for name, ids in sorted(holders.items())]


def serving_lines(snapshot: Snapshot) -> list[str]:
    """Queues and serving figures."""
    lines = [f"{queue.model}|{queue.slo}: {queue.length} waiting" for queue in snapshot.queues]
    lines.append(f"{snapshot.tokens_per_s:.1f} tokens/s")
    lines += [f"{name.removeprefix('collm:')} {value:.6g}" for name, value in snapshot.figures.items()]
    return lines
