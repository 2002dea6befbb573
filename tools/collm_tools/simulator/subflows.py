"""The live dispatcher's policy in virtual time: what `term.py` and `planner.py` do around it, without a broker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import structs

from collm_common.latency import LatencyModel
from collm_common.messages import Expected
from collm_common.types import ReplicaState
from collm_dispatcher.policy.balance import Balance, Limits, Plan
from collm_dispatcher.policy.drift import Drift
from collm_dispatcher.policy.fill import Carrier
from collm_dispatcher.policy.micro import Lane, MicroCycle, Release
from collm_dispatcher.policy.outlook import Fit, Pace, fastest, modes
from collm_dispatcher.policy.pacing import Mode
from collm_dispatcher.policy.queue import DeadlineQueue, Waiting
from collm_dispatcher.policy.recall import Patience
from collm_dispatcher.policy.streams import Stream, Streams
from collm_tools.simulator.recalling import Recalling
from collm_tools.simulator.request import SimRequest
from collm_tools.simulator.scheduling import Moves, View

BATCH = 128
MACRO_S = 0.25
PATIENCE = Patience(step=4, stop=40, resume=40)
"""The live settings' defaults: 1 s, 10 s and 10 s, in ticks."""


class Subflows:
    """One model's leader. `latency` is what the coordinator fitted, by replica; it may grow and change at any time."""

    def __init__(
        self,
        replicas: Sequence[View],
        latency: Mapping[str, LatencyModel],
        limits: Limits | None = None,
        every_s: float = MACRO_S,
    ) -> None:
        self.every_s = every_s
        self.queue = DeadlineQueue()
        self.micro = MicroCycle(self.queue)
        self.streams = Streams()
        self.plan = Plan()
        self.fits: dict[str, Fit] = {}
        self.pace: Pace | None = None
        self._replicas = {replica.id: replica for replica in replicas}
        self._latency = latency
        self._balance = Balance(limits or Limits(patience=PATIENCE))
        self._recalling = Recalling(self._replicas)
        self._drifts: dict[str, Drift] = {}
        self._requests: dict[str, SimRequest] = {}
        self._expected: dict[int, Expected | None] = {}
        self._lanes: tuple[list[Lane], dict[str, list[str]]] = ([], {})
        self._observed_s = 0.0

    # --- micro-cycle

    def arrived(self, now: float, request: SimRequest) -> Moves:
        """Into the queue, and on if there is room; a stream that the plan does not know has it made anew."""
        key, id_ = request.slo.name, str(request.number)
        news = self.streams.arrived(key, request.slo, request.prompt_tokens, now)
        self._requests[id_] = request
        latest_s = None
        if self.pace is not None:
            asked, prompt = request.max_tokens, request.prompt_tokens
            latest_s = self.pace.latest_start_s(now, prompt, asked, request.slo)
        due_s = min(request.deadline_s, request.slo.first_due(now))
        self.queue.add(Waiting(key, id_, id_, "", 0, now, due_s, request.slo, latest_s, "", request.prompt_tokens))
        return self.tick(now) if news or not self.micro.lanes else self._turn(now)

    def ended(self, now: float, requests: Sequence[SimRequest]) -> Moves:
        """Room for the next; what the answers took and how long they were is learned."""
        for request in requests:
            self.micro.ended(request.replica)
            self._learn(request)
        return self._turn(now)

    def preempted(self, now: float, requests: Sequence[SimRequest]) -> None:
        """Nothing is ever preempted."""

    def _learn(self, request: SimRequest) -> None:
        expected = self._expected.pop(request.number, None)
        if request.outcome != "completed":
            return
        self.streams.answered(request.slo.name, request.output_tokens)
        if expected is not None and request.output_tokens > 1:
            token_s = (request.end_s - request.first_s) / (request.output_tokens - 1)
            drift = self._drifts.setdefault(request.replica, Drift())
            drift.observe(expected.token_s, expected.scale, token_s)

    def _turn(self, now: float) -> Moves:
        if not len(self.queue):
            return Moves()
        shed = [self._requests.pop(item.entry_id) for item in self.queue.shed(now)]
        release: list[tuple[SimRequest, str]] = []
        while len(self.queue):
            decided, _ = self.micro.decide(now, BATCH)
            release += [(self._carry_out(found), found.replica) for found in decided]
            if len(decided) < BATCH:
                break
        return Moves(release=release, refuse=shed)

    def _carry_out(self, release: Release) -> SimRequest:
        item = release.item
        self.queue.remove(item)
        request = self._requests.pop(item.entry_id)
        fit, stream = self.fits.get(release.replica), self.streams.of(item.key)
        if fit is not None and stream is not None:
            self._expected[request.number] = fit.expected(stream, item.prompt_tokens, release.ahead + 1)
        return request

    # --- macro-cycle

    def tick(self, now: float) -> Moves:
        """Forecast, modes, plan; then what there is room for now."""
        if now > self._observed_s:
            self.streams.observe(now - self._observed_s)
            self._observed_s = now
        queued = {key: count for key, count in self.queue.counts().items() if count}
        streams = self.streams.lately(now, queued)
        demands = self.streams.demands(streams, queued)
        name = max(streams, key=lambda key: demands[key].rate, default=None)
        busiest = streams[name] if name is not None else None
        self.fits = {id_: self._fit(replica) for id_, replica in self._replicas.items()}
        self.pace = fastest(self.fits.values(), busiest)
        ideal = modes(self.fits.values(), streams)
        carriers = [self._carrier(r, ideal[self.fits[r.id]], streams, name) for r in self._replicas.values()]
        self.plan = self._balance.tick(carriers, demands)
        self._follow()
        moves = self._turn(now)
        moves.promote = self.plan.promote
        self._recalling.apply(self.plan.recall, self.fits, busiest, moves)
        return moves

    def _follow(self) -> None:
        promoted = set(self.plan.promote)
        takes = {id_ for id_, r in self._replicas.items() if r.state is not ReplicaState.IDLE or id_ in promoted}
        ids = [id_ for id_ in self.plan.carriers if id_ in takes]
        routes = {stream: [id_ for id_ in route if id_ in takes] for stream, route in self.plan.routes.items()}
        lanes = [Lane(id_, self.plan.modes[id_], self._replicas[id_].quality) for id_ in ids]
        if (lanes, routes) != self._lanes:
            self._lanes = (lanes, routes)
            self.micro.follow(lanes, routes)

    def _fit(self, replica: View) -> Fit:
        combined, drift = replica.state is ReplicaState.COMBINED, self._drifts.get(replica.id)
        most = min(replica.most, replica.b) if combined else replica.most
        train = replica.training if combined else 0
        return Fit(self._latency.get(replica.id), most, train, drift.factor if drift else 1.0)

    def _carrier(
        self, replica: View, ideal: Mapping[str, Mode], streams: Mapping[str, Stream], busiest: str | None
    ) -> Carrier:
        fit, combined = self.fits[replica.id], replica.state is ReplicaState.COMBINED
        mode = ideal[busiest] if busiest else Mode(fit.most)
        alone = None
        if busiest and combined:
            alone = structs.replace(fit, most=replica.most, train_batch=0).mode(streams[busiest])
        return Carrier(replica.id, replica.state, True, mode, replica.quality, ideal, alone, fit.train_batch)
