"""Lines that a person reads."""

from __future__ import annotations

import msgspec
from rich.console import Console

from collm_common.messages import (
    AdapterPublished,
    AdapterRolledBack,
    Aggregated,
    Event,
    JobChanged,
    ReplicaChanged,
    StateChanged,
    kind,
)

HIDDEN = ("kind", "schema", "time_s")


def say(console: Console, text: str, style: str | None = None) -> None:
    """Print `text` as it stands: brackets are no markup, and no line is broken, so that commands can be copied."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def event_line(event: Event) -> str:
    """The main ones in words, any other as its fields."""
    match event:
        case StateChanged():
            return f"{event.replica}: {event.before} -> {event.after} ({event.reason})"
        case ReplicaChanged():
            return f"{event.replica}: {event.what} ({event.reason})"
        case JobChanged():
            return f"job {event.job}: {event.status}, round {event.round} ({event.reason})"
        case Aggregated():
            return f"job {event.job}: round {event.round} aggregated into {event.adapter}@v{event.version}"
        case AdapterPublished():
            known = event.before is not None and event.after is not None
            told = f" (held-out {event.before:.3f} -> {event.after:.3f})" if known else ""
            return f"{event.name}@v{event.version} published{told}"
        case AdapterRolledBack():
            return f"{event.name}: back from version {event.before} to {event.version} ({event.reason})"
    fields = {name: value for name, value in msgspec.to_builtins(event).items() if name not in HIDDEN}
    return " ".join((kind(event), *(f"{name}={value}" for name, value in fields.items())))
