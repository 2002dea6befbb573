"""What was looked at, how it is, and what to do about it."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class State(StrEnum):
    """`WRONG` stops something from working; `NOTE` makes it slower, or is fine if it is meant so."""

    OK = "ok"
    NOTE = "note"
    WRONG = "wrong"


class Finding(Struct, frozen=True):
    """`remedy` is "" where there is nothing to do."""

    what: str
    state: State
    said: str
    remedy: str = ""


def ok(what: str, said: str) -> Finding:
    """All is well."""
    return Finding(what, State.OK, said)


def note(what: str, said: str, remedy: str) -> Finding:
    """Worth knowing."""
    return Finding(what, State.NOTE, said, remedy)


def wrong(what: str, said: str, remedy: str) -> Finding:
    """Something does not work."""
    return Finding(what, State.WRONG, said, remedy)
