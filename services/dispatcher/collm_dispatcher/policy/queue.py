"""What was read and not yet released, by earliest deadline; the late ones apart."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from math import inf

from msgspec import Struct

from collm_common.types import Slo


class Waiting(Struct, frozen=True):
    """One request: `key` and `entry_id` say where its entry is, times are Unix seconds.

    It must begin before `latest_s` to end by its deadline; None: how long it takes is not known.
    """

    key: str
    entry_id: str
    request_id: str
    ingress: str
    attempt: int
    arrival_s: float
    deadline_s: float
    slo: Slo
    latest_s: float | None = None

    @property
    def refused_s(self) -> float:
        """From when on no answer is wanted."""
        if self.slo.late == "serve":
            return inf
        return self.deadline_s if self.latest_s is None else min(self.deadline_s, self.latest_s)


class DeadlineQueue:
    """Earliest deadline first; a late request goes behind all others.

    If its class says so, it goes out (`shed`) as soon as it can only be late: its place is worth more to others.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, float, str, str]] = []
        self._refused: list[tuple[float, str, str]] = []
        self._late: deque[tuple[str, str]] = deque()
        self._items: dict[tuple[str, str], Waiting] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, place: tuple[str, str]) -> bool:
        return place in self._items

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._items.values())

    def add(self, item: Waiting) -> None:
        """Queue it; an entry that is here already stays as it is."""
        place = (item.key, item.entry_id)
        if place not in self._items:
            self._items[place] = item
            heapq.heappush(self._heap, (item.deadline_s, item.arrival_s, *place))
            if item.refused_s < inf:
                heapq.heappush(self._refused, (item.refused_s, *place))

    def remove(self, item: Waiting) -> None:
        """It was released, shed, or is gone."""
        self._items.pop((item.key, item.entry_id), None)

    def shed(self, now: float) -> list[Waiting]:
        """Take out what can only be late and wants no late answer; the other late ones lose their turn."""
        out: list[Waiting] = []
        while self._refused and self._refused[0][0] <= now:
            _, *place = heapq.heappop(self._refused)
            if (item := self._items.pop((place[0], place[1]), None)) is not None:
                out.append(item)
        while self._heap and self._heap[0][0] <= now:
            *_, key, entry_id = heapq.heappop(self._heap)
            if (key, entry_id) in self._items:
                self._late.append((key, entry_id))
        return out

    def first(self, count: int) -> list[Waiting]:
        """The next `count` in order of release; they stay until they are removed."""
        self._drop_removed()
        found: list[Waiting] = []
        ahead: list[tuple[float, float, str, str]] = []
        while self._heap and len(found) < count:
            row = heapq.heappop(self._heap)
            if (item := self._items.get((row[2], row[3]))) is not None:
                ahead.append(row)
                found.append(item)
        for row in ahead:
            heapq.heappush(self._heap, row)
        for place in self._late:
            if len(found) >= count:
                break
            if place in self._items:
                found.append(self._items[place])
        return found

    def _drop_removed(self) -> None:
        while self._late and self._late[0] not in self._items:
            self._late.popleft()
