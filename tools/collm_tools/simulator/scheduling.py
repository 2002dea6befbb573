"""What decides in a simulated cell: the live policy and its rivals behind one interface, events in, moves out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from collm_common.types import ReplicaState
from collm_tools.simulator.request import SimRequest


class Resize(Struct, frozen=True):
    """New batch sizes of a replica: B, b, and whether its training stands still."""

    replica: str
    train: int
    infer: int
    paused: bool


class Moves(Struct):
    """What to do now, in this order; replicas by their ids. `migrate` moves what waits from the first to the second.

    `preempt` gives the running batch of a replica back to its scheduler (`preempted`). Idle ones become Serving by
    `promote`, Combined ones by `stop`.
    """

    preempt: Sequence[str] = ()
    migrate: Sequence[tuple[SimRequest, str, str]] = ()
    release: Sequence[tuple[SimRequest, str]] = ()
    refuse: Sequence[SimRequest] = ()
    promote: Sequence[str] = ()
    resize: Sequence[Resize] = ()
    stop: Sequence[str] = ()


NOTHING = Moves()


class View(Protocol):
    """What a scheduler may see of a replica: nothing of what it will only know at the end."""

    id: str
    state: ReplicaState
    quality: float
    b: int
    most: int
    train: int

    @property
    def training(self) -> int:
        """B that runs beside inference right now."""

    @property
    def in_flight(self) -> int:
        """All that was sent there and has not ended."""

    @property
    def running(self) -> int:
        """Sequences in the batch."""

    @property
    def waiting(self) -> list[SimRequest]:
        """What was sent there and does not run yet."""


class Scheduler(Protocol):
    """Decides; a tick comes every `every_s`."""

    every_s: float

    def arrived(self, now: float, request: SimRequest) -> Moves:
        """A request is here."""

    def ended(self, now: float, requests: Sequence[SimRequest]) -> Moves:
        """These were completed or refused on their replica."""

    def preempted(self, now: float, requests: Sequence[SimRequest]) -> None:
        """These were thrown out on its own order and are its again."""

    def tick(self, now: float) -> Moves:
        """Time passes."""


class Watched:
    """A scheduler whose time of deciding is counted: `spent_s`, seconds of this process."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.every_s, self.spent_s = scheduler.every_s, 0.0
        self._scheduler = scheduler

    def arrived(self, now: float, request: SimRequest) -> Moves:
        """As the scheduler's."""
        began_s = time.perf_counter()
        moves = self._scheduler.arrived(now, request)
        self.spent_s += time.perf_counter() - began_s
        return moves

    def ended(self, now: float, requests: Sequence[SimRequest]) -> Moves:
        """As the scheduler's."""
        began_s = time.perf_counter()
        moves = self._scheduler.ended(now, requests)
        self.spent_s += time.perf_counter() - began_s
        return moves

    def preempted(self, now: float, requests: Sequence[SimRequest]) -> None:
        """As the scheduler's."""
        self._scheduler.preempted(now, requests)

    def tick(self, now: float) -> Moves:
        """As the scheduler's."""
        began_s = time.perf_counter()
        moves = self._scheduler.tick(now)
        self.spent_s += time.perf_counter() - began_s
        return moves
