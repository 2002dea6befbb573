"""What was read and not yet released: by earliest deadline, fair between streams and tenants, the late ones apart."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterator
from math import inf

from msgspec import Struct

from collm_common.types import Slo

MAX_FLOWS = 64
REST = "\0rest"
LEAD = 16
"""How many more requests than the least served flow another may have had, while both wait."""

Place = tuple[str, str]
Turn = tuple[int, float, float, str, str]
"""(octave of the cost, deadline, arrival, key, entry)."""


class Waiting(Struct, frozen=True):
    """One request: `key` and `entry_id` say where its entry is, times are Unix seconds.

    It must begin before `latest_s` to end by its deadline; None: how long it takes is not known. `tenant` is whose it
    is, `prompt_tokens` what its prefill has to run.
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
    tenant: str = ""
    prompt_tokens: int = 0

    @property
    def place(self) -> Place:
        """Where its entry is."""
        return (self.key, self.entry_id)

    @property
    def refused_s(self) -> float:
        """From when on no answer is wanted."""
        if self.slo.late == "serve":
            return inf
        return self.deadline_s if self.latest_s is None else min(self.deadline_s, self.latest_s)

    @property
    def octave(self) -> int:
        """Of its prompt, where a late answer is refused: what cannot all be in time goes cheapest first.

        0 where it is served late too: there, cheapest first would only make the expensive ones later and later.
        """
        return 0 if self.slo.late == "serve" else self.prompt_tokens.bit_length()


class Flow:
    """The requests of one tenant on one stream; `served` grows with each one that is picked.

    `held` counts those that are here, `waiting` those of them that are not picked, `stale` the rows of `heap` and
    `late` whose request does not wait there any more.
    """

    def __init__(self, stream: str) -> None:
        self.stream = stream
        self.heap: list[Turn] = []
        self.late: deque[Place] = deque()
        self.held = self.waiting = self.served = self.stale = 0


class DeadlineQueue:
    """Earliest deadline first among the flows that are not more than `lead` requests ahead of the least served one.

    While there is room for all nobody is ahead. Inside a flow that refuses late answers, cheaper octaves come before
    the deadline. A late request goes behind all others. If its class says so, it goes out (`shed`) as soon as it can
    only be late: its place is worth more to others. At most MAX_FLOWS flows are told apart, further tenants share one.
    """

    def __init__(self, lead: int = LEAD) -> None:
        self._lead = lead
        self._flows: dict[Place, Flow] = {}
        self._items: dict[Place, Waiting] = {}
        self._flow_of: dict[Place, Flow] = {}
        self._picked: set[Place] = set()
        self._turns: list[tuple[float, str, str]] = []
        self._refused: list[tuple[float, str, str]] = []
        self._late: set[Place] = set()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, place: Place) -> bool:
        return place in self._items

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._items.values())

    @property
    def waiting(self) -> int:
        """Those not picked."""
        return len(self._items) - len(self._picked)

    def add(self, item: Waiting) -> None:
        """Queue it; an entry that is here already stays as it is."""
        place = item.place
        if place in self._items:
            return
        self._items[place] = item
        flow = self._flow_of[place] = self._flow(item.key, item.tenant)
        if not flow.waiting:
            # Who had nothing waiting has no claim to the turns it did not use.
            flow.served = max(flow.served, min((f.served for f in self._flows.values() if f.waiting), default=0))
        flow.held += 1
        self._enter(item, flow)
        if item.deadline_s < inf:
            heapq.heappush(self._turns, (item.deadline_s, *place))
        if item.refused_s < inf:
            heapq.heappush(self._refused, (item.refused_s, *place))

    def remove(self, item: Waiting) -> None:
        """It was released, shed, or is gone."""
        place = item.place
        if self._items.pop(place, None) is None:
            return
        flow = self._flow_of.pop(place)
        flow.held -= 1
        self._late.discard(place)
        if place in self._picked:
            self._picked.remove(place)
        else:
            flow.waiting -= 1
            flow.stale += 1

    def shed(self, now: float) -> list[Waiting]:
        """Take out what can only be late and wants no late answer; the other late ones lose their turn."""
        out: list[Waiting] = []
        while self._refused and self._refused[0][0] <= now:
            _, *place = heapq.heappop(self._refused)
            item = self._items.get((place[0], place[1]))
            if item is not None and item.place not in self._picked:
                self.remove(item)
                out.append(item)
        while self._turns and self._turns[0][0] <= now:
            _, key, entry_id = heapq.heappop(self._turns)
            item = self._items.get((key, entry_id))
            if item is not None and item.place not in self._late:
                self._late.add(item.place)
                if item.place not in self._picked:
                    flow = self._flow_of[item.place]
                    flow.stale += 1
                    flow.late.append(item.place)
        return out

    def pick(self, streams: Container[str] | None = None) -> Waiting | None:
        """The next to be released, among `streams` if they are given; None if none waits.

        It stays until it is removed, and can be put back with `restore`.
        """
        heads: list[Flow] = []
        late: Flow | None = None
        for flow in self._flows.values():
            if not flow.waiting or (streams is not None and flow.stream not in streams):
                continue
            if flow.stale:
                self._trim(flow)
            if flow.heap:
                heads.append(flow)
            elif late is None or flow.served < late.served:
                late = flow
        if not heads:
            return None if late is None else self._take(late, late.late.popleft())
        most = min([flow.served for flow in heads]) + self._lead
        chosen = min([flow for flow in heads if flow.served <= most], key=_head)
        *_, key, entry_id = heapq.heappop(chosen.heap)
        return self._take(chosen, (key, entry_id))

    def _take(self, flow: Flow, place: Place) -> Waiting:
        flow.waiting -= 1
        flow.served += 1
        self._picked.add(place)
        return self._items[place]

    def restore(self, item: Waiting) -> None:
        """What was picked could not be released: it waits again, in its old place."""
        if item.place in self._picked:
            self._picked.remove(item.place)
            flow = self._flow_of[item.place]
            flow.served -= 1
            self._enter(item, flow)
            if item.refused_s < inf:
                heapq.heappush(self._refused, (item.refused_s, *item.place))

    def first(self, count: int, streams: Container[str] | None = None) -> list[Waiting]:
        """The next `count` in order of release; they stay where they are."""
        found: list[Waiting] = []
        while len(found) < count and (item := self.pick(streams)) is not None:
            found.append(item)
        for item in reversed(found):
            self.restore(item)
        return found

    def counts(self) -> dict[str, int]:
        """How many wait on each stream."""
        found: dict[str, int] = {}
        for flow in self._flows.values():
            found[flow.stream] = found.get(flow.stream, 0) + flow.waiting
        return found

    def _enter(self, item: Waiting, flow: Flow) -> None:
        flow.waiting += 1
        if item.place in self._late:
            flow.late.appendleft(item.place)
        else:
            heapq.heappush(flow.heap, (item.octave, item.deadline_s, item.arrival_s, *item.place))

    def _flow(self, stream: str, tenant: str) -> Flow:
        """The flow of a tenant; the shared one when there are too many."""
        if (flow := self._flows.get((stream, tenant))) is not None:
            return flow
        if len(self._flows) >= MAX_FLOWS:
            self._flows = {name: flow for name, flow in self._flows.items() if flow.held}
        if len(self._flows) >= MAX_FLOWS:
            return self._flows.setdefault((stream, REST), Flow(stream))
        return self._flows.setdefault((stream, tenant), Flow(stream))

    def _trim(self, flow: Flow) -> None:
        """Drop from both fronts what is gone, is picked, or has become late."""
        while flow.late and not self._waits(flow.late[0]):
            flow.late.popleft()
            flow.stale -= 1
        while flow.heap:
            place = flow.heap[0][3:]
            if self._waits(place) and place not in self._late:
                return
            heapq.heappop(flow.heap)
            flow.stale -= 1

    def _waits(self, place: Place) -> bool:
        return place in self._items and place not in self._picked


def _head(flow: Flow) -> tuple[float, float, str, str]:
    return flow.heap[0][1:]
