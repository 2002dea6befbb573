"""The live dispatcher's policy in virtual time: what `term.py` and `planner.py` do, without a broker in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from collm_common.latency import LatencyModel
from collm_common.types import ReplicaState, Slo
from collm_dispatcher.policy.balance import Balance, Limits, Plan
from collm_dispatcher.policy.fill import Carrier
from collm_dispatcher.policy.micro import Lane, MicroCycle
from collm_dispatcher.policy.outlook import Fit, Pace, fastest
from collm_dispatcher.policy.pacing import Mode
from collm_dispatcher.policy.queue import Waiting
from collm_dispatcher.policy.streams import Stream, Streams
from collm_tools.simulator.request import SimRequest
from collm_tools.simulator.scheduling import Moves, View

BATCH = 1 << 30


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
        self.streams = Streams()
        self._micro = MicroCycle()
        self.queue = self._micro.queue
        self._replicas = {replica.id: replica for replica in replicas}
        self._latency = latency
        self._balance = Balance(limits)
        self._requests: dict[str, SimRequest] = {}
        self._pace: Pace | None = None
        self._lanes: tuple[list[Lane], Mapping[str, tuple[str, ...]]] = ([], {})
        self._observed_s = 0.0
        self._plan(0.0)

    # --- micro-cycle

    def arrived(self, now: float, request: SimRequest) -> Moves:
        """Into the queue, and on if there is room; a stream that the plan does not know is planned for at once."""
        id_, key = str(request.number), request.slo.name
        self._requests[id_] = request
        news = self.streams.arrived(key, request.slo, request.prompt_tokens, now)
        item = Waiting(key, id_, id_, "", 0, now, request.deadline_s, request.slo, self._latest_s(request))
        self.queue.add(item)
        if news or not self._micro.lanes:
            return self.tick(now)
        return self._turn(now)

    def ended(self, now: float, requests: Sequence[SimRequest]) -> Moves:
        """Room for the next."""
        for request in requests:
            self._micro.ended(request.replica)
            if request.outcome != "refused":
                self.streams.answered(request.slo.name, request.output_tokens)
        return self._turn(now)

    def preempted(self, now: float, requests: Sequence[SimRequest]) -> None:
        """Nothing is ever preempted."""

    def _turn(self, now: float) -> Moves:
        if not len(self.queue):
            return Moves()
        shed = [self._requests.pop(item.entry_id) for item in self.queue.shed(now)]
        releases, _ = self._micro.decide(now, BATCH)
        for release in releases:
            self.queue.remove(release.item)
        moved = [(self._requests.pop(release.item.entry_id), release.replica) for release in releases]
        return Moves(release=moved, refuse=shed)

    def _latest_s(self, request: SimRequest) -> float | None:
        if self._pace is None:
            return None
        return self._pace.latest_start_s(
            request.arrival_s, request.deadline_s, request.prompt_tokens, request.max_tokens, request.slo
        )

    # --- macro-cycle

    def tick(self, now: float) -> Moves:
        """Forecast, modes, plan; then what there is room for now."""
        self.streams.observe(now - self._observed_s)
        self._observed_s = now
        plan = self._plan(now)
        moves = self._turn(now)
        moves.promote = (*plan.promote, *plan.recall.stop)
        moves.pause, moves.resume = plan.recall.pause, plan.recall.resume
        return moves

    def _plan(self, now: float) -> Plan:
        queued = {key: count for key, count in self.queue.counts().items() if count}
        streams = self.streams.lately(now, queued)
        demands = self.streams.demands(streams, queued)
        busiest = max(streams, key=lambda key: demands[key].rate, default=None)
        fits = {id_: _fit(replica, self._latency.get(id_)) for id_, replica in self._replicas.items()}
        self._pace = fastest(fits.values(), streams[busiest].prompt_tokens if busiest else 0.0)
        carriers = [_carrier(replica, fits[id_], streams, busiest) for id_, replica in self._replicas.items()]
        self.plan = self._balance.tick(carriers, demands)
        self._follow()
        return self.plan

    def _follow(self) -> None:
        """A replica whose mode did not change, among the same ones, keeps its place."""
        quality = {id_: replica.quality for id_, replica in self._replicas.items()}
        lanes = [Lane(id_, mode, quality[id_]) for id_, mode in self.plan.modes.items()]
        if (lanes, self.plan.routes) != self._lanes:
            self._lanes = (lanes, self.plan.routes)
            self._micro.follow(lanes, self.plan.routes)


def _fit(replica: View, model: LatencyModel | None) -> Fit:
    if replica.state is ReplicaState.COMBINED and replica.train:
        return Fit(model, min(replica.most, replica.b), replica.train)
    return Fit(model, replica.most)


def _carrier(replica: View, fit: Fit, streams: Mapping[str, Stream], busiest: str | None) -> Carrier:
    modes = {key: fit.mode(stream) for key, stream in streams.items()}
    mode = modes[busiest] if busiest else Mode(fit.most)
    alone = None
    if busiest and fit.train_batch:
        alone = msgspec.structs.replace(fit, most=replica.most, train_batch=0).mode(streams[busiest])
    return Carrier(replica.id, replica.state, True, mode, replica.quality, modes, alone)
