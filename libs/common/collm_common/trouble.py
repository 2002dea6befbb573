"""What the broker does not do: it is away, refuses for now, or refuses until somebody repairs a key or a right."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import redis.exceptions as failures

from collm_common.errors import MessageError

R = TypeVar("R")
T = TypeVar("T")
log = logging.getLogger(__name__)

PASSING = {
    *("BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOGROUP"),
    *("NOREPLICAS", "NOSCRIPT", "OOM", "READONLY", "TRYAGAIN", "UNBLOCKED"),
}
LASTING = {"CROSSSLOT", "NOAUTH", "NOPERM", "WRONGPASS", "WRONGTYPE"}
DAMAGED = "DAMAGED"
AWAY_PAUSE_S, FAULT_PAUSE_S = 0.5, 5.0
MAX_TOLD = 1000
_REFUSALS = (failures.ResponseError, failures.AuthenticationError, failures.AuthorizationError)
_WORD = re.compile(r"\b[A-Z]{3,}\b")


def fault(error: Exception) -> str:
    """The kind of a refusal that waiting does not heal (WRONGTYPE, NOPERM, …; ERR for the rest); "" for all else."""
    if not isinstance(error, _REFUSALS) or isinstance(error, failures.BusyLoadingError):
        return ""
    # redis-py takes known codes off the message, and puts the command in front of it where a pipeline failed.
    code = getattr(error, "status_code", None)
    words = [code] if code else _WORD.findall(str(error).rpartition("caused error: ")[2])
    if not PASSING.isdisjoint(words):
        return ""
    return next((word for word in words if word in LASTING), "ERR")


class Troubles:
    """Of one process: `faults` counts refusals by kind; each is said once for whatever it stops."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self._told: set[tuple[str, str]] = set()

    def tell(self, what: str, error: Exception) -> float:
        """Count and log what stops `what`; returns seconds after which to try again."""
        if not (kind := fault(error)):
            log.warning("%s: broker away: %s", what, error)
            return AWAY_PAUSE_S
        self._count(kind, what, f"the broker refuses, until somebody repairs it: {error}")
        return FAULT_PAUSE_S

    def skip(self, what: str, error: Exception) -> None:
        """Count and log something that cannot be read and that others must not suffer from."""
        self._count(fault(error) or DAMAGED, what, f"it is left out, until somebody repairs it: {error}")

    def _count(self, kind: str, what: str, why: str) -> None:
        self.faults[kind] += 1
        if (what, kind) not in self._told:
            if len(self._told) >= MAX_TOLD:
                self._told.clear()
            self._told.add((what, kind))
            log.error("%s: %s", what, why)


TROUBLES = Troubles()
"""Of this process, as the root logger is."""


def readable(read: Callable[[R], T | None], what: str, row: R | Exception) -> T | None:
    """What `read` makes of a reply of a pipeline; None for one that is empty, refused for good, or damaged.

    `read` raises MessageError for a damaged one. Raises what the reply is if waiting helps.
    """
    try:
        if isinstance(row, Exception):
            raise row
        return read(row) if row else None
    except (MessageError, *_REFUSALS) as error:
        if not isinstance(error, MessageError) and not fault(error):
            raise
        TROUBLES.skip(what, error)
        return None


def written(what: str, names: Iterable[bytes]) -> Iterator[str]:
    """The names that are UTF-8, as everything is that CoLLM writes; the others are left out."""
    for name in names:
        try:
            yield name.decode()
        except UnicodeDecodeError as error:
            TROUBLES.skip(what, error)


@contextmanager
def contained(what: str) -> Iterator[None]:
    """A fault ends this block and nothing else."""
    try:
        yield
    except _REFUSALS as error:
        if not fault(error):
            raise
        TROUBLES.tell(what, error)
