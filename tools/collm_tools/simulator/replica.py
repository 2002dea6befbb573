"""A replica under continuous batching, from completion to completion.

Between two events every running sequence gets a token an iteration, so a sequence ends when the count of iterations
since the start, the *pace*, has grown by its length. Nothing happens per step.
"""

from __future__ import annotations

import heapq
from math import ceil, inf
from operator import itemgetter

from collm_common.messages import InferenceReport
from collm_common.types import ReplicaState
from collm_tools.simulator.hardware import (
    MERGED_DECODE,
    MERGED_PREFILL,
    MICRO_STEP_SLOWED_BY_PREFILL,
    Hardware,
)
from collm_tools.simulator.meter import Meter
from collm_tools.simulator.request import SimRequest

EPSILON_S = 1e-9
EPSILON_ITERATIONS = 1e-6


class Replica:
    """At most `b` sequences run; the rest waits, by deadline or as it came (`fifo`).

    A burst prefills the prompts that fit into one iteration, or one longer prompt in pieces; meanwhile each running
    sequence gets a token per piece, at the step time with which the burst began. `merging`: while all that runs is on
    one adapter, it runs without LoRA's cost. `static`: a batch begins and ends as a whole. `next_s` is when something
    happens next without anybody doing anything.
    """

    def __init__(
        self,
        id_: str,
        hardware: Hardware,
        most: int,
        *,
        fifo: bool = False,
        merging: bool = False,
        static: bool = False,
    ) -> None:
        self.id, self.hardware, self.most = id_, hardware, most
        self.b = most
        self.state = ReplicaState.SERVING
        self.quality = 1.0
        self.train = 0
        self.paused = False
        self.loss = 1.0
        self.micro_steps = 0.0
        self.next_s = inf
        self.meter = Meter()
        self.activity_s = self.busy_s = self.train_s = 0.0
        self.adapters: dict[int, int] = {}
        self._fifo, self._merging, self._static = fifo, merging, static
        self._waiting: list[tuple[float, int, SimRequest]] = []
        self._queued: set[int] = set()
        self._ended: list[SimRequest] = []
        self._burst: list[SimRequest] = []
        self._running: list[tuple[float, int, SimRequest]] = []
        self._now = self._pace = self._rate = 0.0
        self._burst_end_s = inf

    # --- what a scheduler may see

    @property
    def running(self) -> int:
        """Sequences in the batch, those in prefill included."""
        return len(self._running) + len(self._burst)

    @property
    def in_flight(self) -> int:
        """All that was sent here and has not ended."""
        return len(self._queued) + len(self._running) + len(self._burst)

    @property
    def waiting(self) -> list[SimRequest]:
        """What was sent here and does not run yet, first come first."""
        rows = {number: item for _, number, item in sorted(self._waiting, key=itemgetter(0, 1))}
        return [item for number, item in rows.items() if number in self._queued]

    # --- what may be done to it

    def add(self, now: float, request: SimRequest) -> None:
        """A request arrives at the replica."""
        self.advance(now)
        key = request.released_s if self._fifo else request.deadline_s
        heapq.heappush(self._waiting, (key, request.number, request))
        self._queued.add(request.number)
        if self._burst_end_s == inf:
            self._admit(now)

    def withdraw(self, request: SimRequest) -> bool:
        """Take back what still waits; False if it runs already."""
        if request.number not in self._queued:
            return False
        self._queued.remove(request.number)
        return True

    def preempt(self, now: float) -> list[SimRequest]:
        """Throw the running batch out; what its members had so far is lost."""
        self.advance(now)
        out = [item for _, _, item in self._running] + self._burst
        self._running, self._burst, self._burst_end_s = [], [], inf
        self.adapters.clear()
        self._admit(now)
        return out

    def configure(self, now: float, b: int, train: int, paused: bool = False) -> None:
        """New batch sizes. A lower `b` stops admission; nobody is thrown out."""
        self.advance(now)
        self.b, self.train, self.paused = max(1, min(b, self.most)), train, paused
        if self._burst_end_s == inf:
            self._admit(now)

    @property
    def training(self) -> int:
        """B that runs beside inference right now."""
        return 0 if self.paused else self.train

    def report(self, now: float) -> InferenceReport:
        """Telemetry since the last one."""
        self.advance(now)
        meter, self.meter = self.meter, Meter(now)
        return meter.report(self.id, self.state, now, len(self._queued), self.b, self.training)

    # --- time

    def advance(self, now: float) -> None:
        """Let time pass up to `now`, at which nothing may be overdue."""
        elapsed = now - self._now
        if elapsed <= 0:
            return
        self._now = now
        iterations = elapsed * self._rate
        self._pace += iterations
        running, prefilling, train = len(self._running), bool(self._burst), self.training
        hardware = self.hardware
        if prefilling:
            activity = elapsed * hardware.prefill_activity[train]
        else:
            row = hardware.activity[train]
            activity = elapsed * (row[running] if running < len(row) else row[-1])
        self.activity_s += activity
        meter = self.meter
        meter.activity_s += activity
        if running or prefilling:
            self.busy_s += elapsed
            meter.busy_s += elapsed
            meter.sequence_s += elapsed * (running + len(self._burst))
            if prefilling:
                meter.prefill_s += elapsed
            else:
                meter.decoded(train, running, elapsed, iterations)
        if train:
            slowed = MICRO_STEP_SLOWED_BY_PREFILL if prefilling else 1.0
            self.micro_steps += elapsed / (slowed * hardware.micro_step[train])
            self.train_s += elapsed

    def step(self, now: float) -> None:
        """Do what is due at `now`: the end of a burst, ends of sequences."""
        self.advance(now)
        if self._burst_end_s <= now + EPSILON_S:
            self._start_decoding(now)
        while self._running and self._running[0][0] <= self._pace + EPSILON_ITERATIONS:
            self._end(now, heapq.heappop(self._running)[2])
        self._admit(now) if self._burst_end_s == inf else self._schedule()

    def take_ended(self) -> list[SimRequest]:
        """What was completed or refused since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _start_decoding(self, now: float) -> None:
        burst, self._burst, self._burst_end_s = self._burst, [], inf
        longest = max(request.output_tokens for request in burst)
        for request in burst:
            request.first_s = now
            tokens = longest if self._static else request.output_tokens
            if tokens <= 1:
                self._end(now, request)
            else:
                end = self._pace + tokens - 1
                heapq.heappush(self._running, (end, request.number, request))

    def _end(self, now: float, request: SimRequest) -> None:
        request.end_s, request.outcome = now, "completed"
        self._count(request.adapter, -1)
        self.meter.finished += 1
        self.meter.output_tokens += request.output_tokens
        self._ended.append(request)

    def _admit(self, now: float) -> None:
        """Fill the batch from the queue, in one burst. What nobody waits for any more is refused."""
        room, tokens, waiting = self.b - len(self._running), 0, self._waiting
        if self._static and self._running:
            room = 0
        while room > 0 and waiting:
            _, number, request = waiting[0]
            if number not in self._queued:
                heapq.heappop(waiting)
                continue
            if self._burst and tokens + request.prompt_tokens > self.hardware.step_tokens:
                break
            heapq.heappop(waiting)
            self._queued.remove(number)
            if request.wanted_s <= now:
                request.outcome = "refused"
                self._ended.append(request)
                continue
            room -= 1
            tokens += request.prompt_tokens
            request.started_s = now
            request.cross_entropy = self.loss * request.difficulty
            self._count(request.adapter, 1)
            self._burst.append(request)
        if self._burst:
            self._begin_burst(now, tokens)
        self._schedule()

    def _begin_burst(self, now: float, tokens: int) -> None:
        train, hardware = self.training, self.hardware
        pieces = max(1, ceil(tokens / hardware.step_tokens))
        row = hardware.decode[train]
        decode_s = row[min(self.running, len(row) - 1)]
        prefill_s = hardware.prefill[train] * tokens
        if self._merging and len(self.adapters) == 1:
            decode_s, prefill_s = decode_s * MERGED_DECODE, prefill_s * MERGED_PREFILL
        duration = max(pieces * hardware.mixed_s, pieces * decode_s + prefill_s)
        self._burst_end_s, self._rate = now + duration, pieces / duration
        self.meter.prefill_tokens += tokens

    def _schedule(self) -> None:
        """When the next sequence ends, or the burst."""
        running = len(self._running)
        if self._burst_end_s == inf:
            if not running:
                self._rate, self.next_s = 0.0, inf
                return
            row = self.hardware.decode[self.training]
            step_s = row[running] if running < len(row) else row[-1]
            if self._merging and len(self.adapters) == 1:
                step_s *= MERGED_DECODE
            self._rate = 1 / step_s
        ends = self._now + (self._running[0][0] - self._pace) / self._rate if running else inf
        self.next_s = min(self._burst_end_s, max(ends, self._now))

    def _count(self, adapter: int, change: int) -> None:
        count = self.adapters.get(adapter, 0) + change
        if count:
            self.adapters[adapter] = count
        else:
            del self.adapters[adapter]
