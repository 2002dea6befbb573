"""The micro-cycle: which waiting request goes to which replica now. Events in, releases out.

Every release is into the room of a replica's b, so that the pace is lambda = b / S(b) by itself: room comes back as
fast as answers end. What is fuller for its b, or has the lower quality, comes later.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from math import inf

from msgspec import Struct

from collm_dispatcher.policy.pacing import Mode, due_s
from collm_dispatcher.policy.queue import DeadlineQueue, Waiting


class Lane(Struct, frozen=True):
    """A replica that takes requests in this mode; a larger `weight` (its quality) draws more of them."""

    id: str
    mode: Mode
    weight: float = 1.0


class Release(Struct, frozen=True):
    """`item` goes to `replica`, which has room for `most`; `ahead` others are there already."""

    item: Waiting
    replica: str
    most: int
    ahead: int


class _Place(Struct):
    lane: Lane
    rank: int
    streams: tuple[str, ...]
    in_flight: int = 0
    version: int = 0


class MicroCycle:
    """Plain state: the queue, and how many requests each replica has, as far as is known.

    A number that is wrong does no harm: whoever carries a release out checks the room again and tells the truth
    through `count`.
    """

    def __init__(self, queue: DeadlineQueue | None = None) -> None:
        self.queue = DeadlineQueue() if queue is None else queue
        self._places: dict[str, _Place] = {}
        self._heaps: dict[str, list[tuple[float, int, int, str]]] = {}
        self._in_flight: dict[str, int] = {}

    def follow(self, lanes: Sequence[Lane], routes: Mapping[str, Sequence[str]]) -> None:
        """A new plan: `routes` names the lanes of each stream, those that come first are preferred among equals."""
        streams: dict[str, list[str]] = {lane.id: [] for lane in lanes}
        for stream, ids in routes.items():
            for id_ in ids:
                streams[id_].append(stream)
        self._in_flight |= {id_: place.in_flight for id_, place in self._places.items()}
        self._places = {
            lane.id: _Place(lane, rank, tuple(streams[lane.id]), self._in_flight.get(lane.id, 0))
            for rank, lane in enumerate(lanes)
        }
        self._heaps = {stream: [] for stream in routes}
        for place in self._places.values():
            self._offer(place)

    def forget(self, replica: str) -> None:
        """It is gone, with all it had."""
        self._in_flight.pop(replica, None)
        if (place := self._places.pop(replica, None)) is not None:
            place.version += 1

    def count(self, replica: str, in_flight: int) -> None:
        """So many requests are at a replica."""
        self._in_flight[replica] = in_flight
        if (place := self._places.get(replica)) is not None and place.in_flight != in_flight:
            place.in_flight = in_flight
            self._offer(place)

    def ended(self, replica: str, requests: int = 1) -> None:
        """So many answers of a replica have ended."""
        place = self._places.get(replica)
        here = place.in_flight if place is not None else self._in_flight.get(replica, 0)
        self.count(replica, max(0, here - requests))

    @property
    def lanes(self) -> list[str]:
        """Who takes requests."""
        return list(self._places)

    @property
    def room(self) -> int:
        """Requests that could be released at once."""
        return sum(max(0, place.lane.mode.b - place.in_flight) for place in self._places.values())

    def decide(self, now: float, most: int, hold_s: float = 0.0) -> tuple[list[Release], float]:
        """At most `most` releases, and when to look again if nothing happens until then (infinite: need not).

        What is shed is the queue's business, before. Those released stay picked until they are removed or restored.
        `hold_s`: how long the first may wait for others that fill the room with it, within the slack of its deadline.
        """
        if hold_s and (due := self._held_until(now, hold_s)) > now:
            return [], due
        released: list[Release] = []
        open_ = set(self._heaps)
        while open_ and len(released) < most:
            # A stream without room is closed before a pick: what is picked always has a place.
            open_ -= {stream for stream in open_ if self._first(stream) is None}
            item = self.queue.pick(open_)
            if item is None:
                break
            place = self._first(item.key)
            assert place is not None
            released.append(Release(item, place.lane.id, place.lane.mode.b, place.in_flight))
            place.in_flight += 1
            self._offer(place)
        return released, inf

    def refuse(self, release: Release) -> None:
        """It was not carried out: the request waits again."""
        self.queue.restore(release.item)
        self.ended(release.replica)

    def _held_until(self, now: float, hold_s: float) -> float:
        first = self.queue.first(1, self._heaps)
        place = self._first(first[0].key) if first else None
        if place is None:
            return now
        due = due_s(now, self.queue.waiting, self.room, first[0].deadline_s, place.lane.mode, hold_s)
        return min(due, first[0].arrival_s + hold_s)

    def _offer(self, place: _Place) -> None:
        """Its place among those with room, in the heap of each of its streams; older entries become void."""
        place.version += 1
        lane = place.lane
        if place.in_flight >= lane.mode.b:
            return
        load = place.in_flight / (lane.mode.b * lane.weight)
        for stream in place.streams:
            heapq.heappush(self._heaps[stream], (load, place.rank, place.version, lane.id))

    def _first(self, stream: str) -> _Place | None:
        heap = self._heaps[stream]
        while heap:
            _, _, version, id_ = heap[0]
            place = self._places.get(id_)
            if place is not None and place.version == version:
                return place
            heapq.heappop(heap)
        return None
