"""Who gets the next request: kept from one to the next, so that each costs O(log n) in the number of replicas."""

from __future__ import annotations

import heapq


class Rooms:
    """Replicas by the share of their b that is in flight, the smallest first; ties go by rank.

    The heap keeps outdated rows; `_now` says which row of a replica counts.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._now: dict[str, tuple[float, int, str]] = {}
        self._sizes: dict[str, list[int]] = {}
        self.free = 0

    def set(self, id_: str, rank: int, b: int, in_flight: int) -> None:
        """A replica takes requests, or its sizes changed."""
        self.remove(id_)
        self._sizes[id_] = [rank, b, in_flight]
        self.free += max(0, b - in_flight)
        self._push(id_)

    def remove(self, id_: str) -> None:
        """It takes no requests; unknown ones are none already."""
        if id_ in self._sizes:
            _, b, in_flight = self._sizes.pop(id_)
            self.free -= max(0, b - in_flight)
            self._now.pop(id_, None)

    def take(self) -> str | None:
        """The replica for one request, which counts as in flight there; None if there is no room."""
        while self._heap:
            row = heapq.heappop(self._heap)
            id_ = row[2]
            if self._now.get(id_) is not row:
                continue
            self._sizes[id_][2] += 1
            self.free -= 1
            self._push(id_)
            return id_
        return None

    def freed(self, id_: str) -> None:
        """A request ended there."""
        if (sizes := self._sizes.get(id_)) is not None:
            sizes[2] -= 1
            self.free += sizes[2] < sizes[1]
            self._push(id_)

    def _push(self, id_: str) -> None:
        rank, b, in_flight = self._sizes[id_]
        if in_flight < b:
            row = self._now[id_] = (in_flight / b, rank, id_)
            heapq.heappush(self._heap, row)
        else:
            self._now.pop(id_, None)
