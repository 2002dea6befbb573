"""The live dispatcher's policy in virtual time: what `leader.py` does around it, without a broker in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from collm_common.latency import LatencyModel
from collm_common.types import ReplicaState, Slo
from collm_dispatcher.policy.balance import Balance, Carrier, Demand, Limits, Plan
from collm_dispatcher.policy.forecast import Forecast
from collm_dispatcher.policy.pacing import Mode, Shape, combined_mode, latest_s, least_s, serving_mode
from collm_dispatcher.policy.queue import DeadlineQueue, Waiting
from collm_dispatcher.policy.rooms import Rooms
from collm_tools.simulator.request import SimRequest
from collm_tools.simulator.scheduling import Moves, View

PROMPT_WEIGHT = 0.05


class Subflows:
    """One model's leader. `latency` is what the coordinator fitted, by replica; it may grow and change at any time."""

    def __init__(
        self,
        replicas: Sequence[View],
        slos: Sequence[Slo],
        latency: Mapping[str, LatencyModel],
        limits: Limits | None = None,
        every_s: float = 0.25,
    ) -> None:
        self.every_s = every_s
        self.plan = Plan()
        self.queue = DeadlineQueue()
        self._replicas = {replica.id: replica for replica in replicas}
        self._slos, self._latency = slos, latency
        self._balance, self._forecast = Balance(limits), Forecast()
        self._requests: dict[str, SimRequest] = {}
        self._rooms = Rooms()
        self._modes: dict[str, Mode] = {}
        self._known: dict[object, Mode] = {}
        self._fastest: set[tuple[LatencyModel, int]] = set()
        self._arrivals = 0
        self._observed_s = 0.0
        self._prompt_tokens = 0.0
        self._plan(0.0)

    # --- micro-cycle

    def arrived(self, now: float, request: SimRequest) -> Moves:
        """Into the queue, and on if there is room."""
        self._arrivals += 1
        weight = PROMPT_WEIGHT if self._prompt_tokens else 1.0
        self._prompt_tokens += weight * (request.prompt_tokens - self._prompt_tokens)
        id_ = str(request.number)
        self._requests[id_] = request
        self.queue.add(Waiting("s", id_, id_, "", 0, now, request.deadline_s, request.slo, self._latest_s(request)))
        return self._turn(now)

    def ended(self, now: float, requests: Sequence[SimRequest]) -> Moves:
        """Room for the next."""
        for request in requests:
            self._rooms.freed(request.replica)
        return self._turn(now)

    def preempted(self, now: float, requests: Sequence[SimRequest]) -> None:
        """Nothing is ever preempted."""

    def _turn(self, now: float) -> Moves:
        queue = self.queue
        if not len(queue):
            return Moves()
        shed = [self._requests.pop(item.entry_id) for item in queue.shed(now)]
        release: list[tuple[SimRequest, str]] = []
        for item in queue.first(self._rooms.free) if self._rooms.free > 0 else ():
            replica = self._rooms.take()
            if replica is None:
                break
            queue.remove(item)
            release.append((self._requests.pop(item.entry_id), replica))
        return Moves(release=release, refuse=shed)

    def _latest_s(self, request: SimRequest) -> float | None:
        if not self._fastest:
            return None
        seconds = min(
            least_s(
                partial(model.iteration_s, train),
                model.prefill_s(request.prompt_tokens),
                model.output_tokens,
                request.max_tokens,
                request.slo,
            )
            for model, train in self._fastest
        )
        return latest_s(request.arrival_s, request.deadline_s, seconds)

    # --- macro-cycle

    def tick(self, now: float) -> Moves:
        """Forecast, modes, plan; then what there is room for now."""
        self._forecast.observe(self._arrivals, now - self._observed_s)
        self._arrivals, self._observed_s = 0, now
        plan = self._plan(now)
        moves = self._turn(now)
        moves.promote, moves.pause, moves.resume = plan.promote, plan.pause, plan.resume
        return moves

    def _plan(self, now: float) -> Plan:
        modes = {id_: self._mode(replica) for id_, replica in self._replicas.items()}
        carriers = [Carrier(r.id, r.state, True, modes[r.id], r.quality) for r in self._replicas.values()]
        before, self.plan = self.plan, self._balance.tick(carriers, Demand(len(self.queue), self._forecast.rate))
        self._set_rooms(before, modes)
        able = [replica for replica in self._replicas.values() if replica.id in self._latency]
        whole = len(able) == len(self._replicas)
        self._fastest = {(self._latency[r.id], _train(r)) for r in able} if whole else set()
        return self.plan

    def _set_rooms(self, before: Plan, modes: dict[str, Mode]) -> None:
        """Ranks follow the plan; a replica whose place and b did not change keeps its room."""
        same_order = before.carriers == self.plan.carriers
        for id_ in set(before.carriers) - set(self.plan.carriers):
            self._rooms.remove(id_)
        for rank, id_ in enumerate(self.plan.carriers):
            if not same_order or modes[id_].b != self._modes[id_].b:
                self._rooms.set(id_, rank, modes[id_].b, self._replicas[id_].in_flight)
        self._modes = modes

    def _mode(self, replica: View) -> Mode:
        model, train = self._latency.get(replica.id), _train(replica)
        shape = Shape(
            prefill_s=0.0 if model is None else round(model.prefill_s(self._prompt_tokens), 3),
            output_tokens=1.0 if model is None else model.output_tokens,
        )
        key = (model, train, shape, replica.b, replica.most)
        if key not in self._known:
            step = None if model is None else partial(model.iteration_s, train)
            self._known[key] = (
                combined_mode(step, shape, min(replica.most, replica.b))
                if replica.state is ReplicaState.COMBINED and train
                else serving_mode(step, shape, self._slos, replica.most)
            )
        return self._known[key]


def _train(replica: View) -> int:
    return replica.train if replica.state is ReplicaState.COMBINED else 0
