"""Shepherd: replicas in groups planned by long-term load, in each group the largest feasible batch first, preemption.

After Zhang et al., "SHEPHERD: Serving DNNs in the Wild" (NSDI 2023). A stream is what can share a batch there: one
objective on one model, here one adapter. The planner (HERD) gives each group of streams its share of the replicas; its
integer program is a greedy bin packing here. Online (FLEX), a replica gets the largest batch that all of its members
keep their deadlines in, and a batch `PREEMPTION` times as large replaces a running one; requests that no batch can
serve in time any more are dropped. A replica that runs a stream also takes more of it while there is room, which
continuous batching allows and Shepherd's own engine did not: that favours it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from collm_common.latency import LatencyModel
from collm_common.types import ReplicaState
from collm_tools.simulator.request import SimRequest
from collm_tools.simulator.scheduling import Moves, View

PREEMPTION = 3.03
"""By how much a batch must be larger to replace a running one; the bound of the paper's competitive ratio."""


class Stream:
    """The requests of one adapter, by deadline."""

    def __init__(self, adapter: int) -> None:
        self.adapter = adapter
        self.came = 0
        self._heap: list[tuple[float, int, SimRequest]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: SimRequest) -> None:
        """Queue it."""
        heapq.heappush(self._heap, (request.deadline_s, request.number, request))

    def pop(self) -> SimRequest:
        """The most urgent one."""
        return heapq.heappop(self._heap)[2]

    def drop(self, now: float, model: LatencyModel) -> list[SimRequest]:
        """Those at the front that could not be served in time even alone."""
        dropped: list[SimRequest] = []
        while self._heap and slack_s(now, self._heap[0][2], model) < 0:
            dropped.append(self.pop())
        return dropped

    def feasible(self, now: float, model: LatencyModel, running: int, room: int) -> int:
        """How many can join `running` others so that the most urgent one is still in time."""
        if not self._heap:
            return 0
        first = self._heap[0][2]
        left = slack_s(now, first, model)
        alone = model.service_s(0, 1, first.prompt_tokens)
        low, high = 0, min(max(0, room), len(self._heap))
        while low < high:
            size = (low + high + 1) // 2
            batch_s = batch_seconds(model, running + size, first)
            if batch_s - alone <= left:
                low = size
            else:
                high = size - 1
        return low


def batch_seconds(model: LatencyModel, size: int, request: SimRequest) -> float:
    """A batch of `size` such requests: all prefills, then the expected length at this batch."""
    prefill_s = model.prefill_s(request.prompt_tokens)
    if request.slo.e2e_s is None:
        return size * prefill_s + model.iteration_s(0, size)
    return size * prefill_s + model.output_tokens * model.iteration_s(0, size)


def slack_s(now: float, request: SimRequest, model: LatencyModel) -> float:
    """Seconds that the request could still wait if it then ran alone."""
    by_s = request.deadline_s if request.slo.ttft_s is None else request.arrival_s + request.slo.ttft_s
    return by_s - now - batch_seconds(model, 1, request)


@dataclass
class Draft:
    """Moves in the making."""

    preempt: list[str] = field(default_factory=list)
    release: list[tuple[SimRequest, str]] = field(default_factory=list)
    refuse: list[SimRequest] = field(default_factory=list)

    def moves(self) -> Moves:
        """As the cell takes them."""
        return Moves(preempt=self.preempt, release=self.release, refuse=self.refuse)


class Shepherd:
    """`model` is what a replica takes; groups are planned anew every `every_s`."""

    def __init__(
        self, replicas: Sequence[View], adapters: int, model: LatencyModel, groups: int = 4, every_s: float = 60.0
    ) -> None:
        self.every_s = every_s
        self.preemptions = 0
        self._replicas, self._model = replicas, model
        self._streams = [Stream(adapter) for adapter in range(adapters)]
        self._runs: dict[str, int] = {}
        self._count = max(1, min(groups, adapters, len(replicas)))
        self._group_of = [adapter % self._count for adapter in range(adapters)]
        self._members = self._shares([1.0] * self._count)

    def arrived(self, now: float, request: SimRequest) -> Moves:
        """Queue it, and serve its group."""
        stream = self._streams[request.adapter]
        stream.came += 1
        stream.push(request)
        return self._serve(now, (self._group_of[request.adapter],))

    def ended(self, now: float, requests: Sequence[SimRequest]) -> Moves:
        """A replica has room: its group is served."""
        groups = {self._group_of[request.adapter] for request in requests}
        groups |= {n for n, members in enumerate(self._members) for r in members if r.id == requests[0].replica}
        return self._serve(now, sorted(groups))

    def preempted(self, now: float, requests: Sequence[SimRequest]) -> None:
        """They wait again, and start anew."""
        for request in requests:
            self._streams[request.adapter].push(request)

    def tick(self, now: float) -> Moves:
        """HERD: streams to groups by load, the heaviest first into the lightest group; replicas to groups by load."""
        loads = [0.0] * self._count
        for stream in sorted(self._streams, key=lambda stream: (-stream.came, stream.adapter)):
            group = loads.index(min(loads))
            self._group_of[stream.adapter] = group
            loads[group] += max(1, stream.came)
            stream.came = 0
        self._members = self._shares(loads)
        return self._serve(now, range(self._count))

    def _shares(self, loads: Sequence[float]) -> list[list[View]]:
        """Replicas by load, at least one for each group; what is left over goes to the heaviest per replica."""
        counts = [1] * self._count
        for _ in range(len(self._replicas) - self._count):
            counts[max(range(self._count), key=lambda n: loads[n] / counts[n])] += 1
        replicas = iter(self._replicas)
        return [[next(replicas) for _ in range(count)] for count in counts]

    # --- FLEX

    def _serve(self, now: float, groups: Iterable[int]) -> Moves:
        draft = Draft()
        for group in groups:
            streams = [stream for stream in self._streams if self._group_of[stream.adapter] == group and len(stream)]
            for stream in streams:
                draft.refuse += stream.drop(now, self._model)
            for replica in self._members[group]:
                if replica.state is not ReplicaState.IDLE and any(len(stream) for stream in streams):
                    self._give(now, replica, streams, draft)
        return draft.moves()

    def _give(self, now: float, replica: View, streams: Sequence[Stream], draft: Draft) -> None:
        """The largest feasible batch to this replica, if it is free, runs the same stream, or runs much less."""
        running = replica.in_flight
        free = {s.adapter: s.feasible(now, self._model, 0, replica.b) for s in streams}
        best = max(streams, key=lambda stream: (free[stream.adapter], -stream.adapter))
        if running == 0:
            self._release(replica, best, free[best.adapter], draft)
            return
        runs = self._runs.get(replica.id)
        same = next((stream for stream in streams if stream.adapter == runs), None)
        if best.adapter != runs and free[best.adapter] >= PREEMPTION * running:
            self.preemptions += 1
            draft.preempt.append(replica.id)
            self._release(replica, best, free[best.adapter], draft)
        elif same is not None:
            room = same.feasible(now, self._model, running, replica.b - running)
            self._release(replica, same, room, draft)

    def _release(self, replica: View, stream: Stream, size: int, draft: Draft) -> None:
        if size:
            self._runs[replica.id] = stream.adapter
            draft.release += [(stream.pop(), replica.id) for _ in range(size)]
