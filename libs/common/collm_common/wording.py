"""Events as lines that a person reads."""

from __future__ import annotations

import msgspec

from collm_common.messages import (
    AdapterPublished,
    AdapterRolledBack,
    Aggregated,
    Evaluated,
    Event,
    JobChanged,
    ReplicaChanged,
    StateChanged,
    UpdateUploaded,
    kind,
)

HIDDEN = ("kind", "schema", "time_s")


def event_line(event: Event) -> str:
    """The main ones in words, any other as its fields."""
    match event:
        case StateChanged():
            return f"{event.replica}: {event.before} -> {event.after} ({event.reason})"
        case ReplicaChanged():
            return f"{event.replica}: {event.what} ({event.reason})"
        case JobChanged():
            return f"job {event.job}: {event.status}, round {event.round} ({event.reason})"
        case UpdateUploaded():
            about = f"{event.samples} samples, loss {event.loss:.3f}"
            return f"job {event.job}: {event.replica} sent its update of round {event.round} ({about})"
        case Aggregated():
            return f"job {event.job}: round {event.round} aggregated into {event.adapter}@v{event.version}"
        case Evaluated():
            about = f"held-out {event.quality.cross_entropy:.3f}"
            return f"job {event.job}: {event.replica} judged {event.adapter}@v{event.version} ({about})"
        case AdapterPublished():
            known = event.before is not None and event.after is not None
            told = f" (held-out {event.before:.3f} -> {event.after:.3f})" if known else ""
            return f"{event.name}@v{event.version} published{told}"
        case AdapterRolledBack():
            return f"{event.name}: back from version {event.before} to {event.version} ({event.reason})"
    fields = {name: value for name, value in msgspec.to_builtins(event).items() if name not in HIDDEN}
    return " ".join((kind(event), *(f"{name}={value}" for name, value in fields.items())))
