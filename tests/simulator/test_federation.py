"""Launcher, coordinator and training in virtual time, on the services' own policies."""

from __future__ import annotations

from math import inf

import pytest
from msgspec import structs

from collm_common.latency import LatencyModel
from collm_common.messages import Hyperparams
from collm_common.types import BatchSizes, ReplicaState
from collm_launcher.policy.idle import IdleRules
from collm_launcher.policy.job import Rules
from collm_tools.load.traffic import Arrival, phases
from collm_tools.simulator.cell import Cell
from collm_tools.simulator.coordinating import CoordinatorRules
from collm_tools.simulator.federation import Federation, Training
from collm_tools.simulator.learning import DEMO_ROUNDS, UNLIKE_ROUNDS, Curve, effective, fitted
from collm_tools.simulator.offers import offers
from collm_tools.simulator.replica import Replica
from collm_tools.simulator.request import SimRequest
from collm_tools.simulator.subflows import Subflows
from tests.simulator.support import SLO, known, replicas

TRAINING = Training(
    rules=Rules(rounds=2, steps=5, hyper=Hyperparams(accumulation=2)),
    idle=IdleRules(window=3, return_ticks=5),
    tick_s=1.0,
    fit_s=60.0,
    cooldown_s=5.0,
    aggregate_s=0.5,
    evaluate_s=0.5,
    curve=Curve(scale=300.0),
)


class Run:
    """A cell of four replicas under a load, and all that can be seen of it."""

    def __init__(self, load: list[Arrival], training: Training = TRAINING, pair: BatchSizes | None = None) -> None:
        self.replicas = replicas(4)
        self.ended: list[SimRequest] = []
        self.states: list[tuple[float, str, ReplicaState, ReplicaState, str]] = []
        latency: dict[str, LatencyModel] = known(self.replicas)
        cell = Cell(self.replicas, Subflows(self.replicas, latency), self.ended.append)
        cell.on_state.append(self._note)
        rules = CoordinatorRules(SLO, max_train_batch=8, pair=pair)
        self.federation = Federation(cell, training, rules, latency)
        self.chosen: list[BatchSizes] = []
        cell.every(1.0, lambda _: self.chosen.extend(self.federation.coordinating.sizes.values()))
        cell.run(offers(load, SLO))

    def _note(self, now: float, replica: Replica, before: ReplicaState, reason: str) -> None:
        self.states.append((now, replica.id, before, replica.state, reason))


LULL = [Arrival(a.at_s, 50, 10) for a in phases([(40, 8), (0.5, 40), (40, 8)], seed=2)]


@pytest.fixture(scope="module")
def lull() -> Run:
    """A minute with little to do, between two bursts."""
    return Run(LULL)


def test_a_lull_is_used_for_training_and_nobody_loses_a_request(lull: Run) -> None:
    """A round that never starts, or one that costs answers."""
    run = lull
    assert run.federation.jobs >= 1
    assert run.federation.reached[-1][1] < 1.3
    assert sorted(request.number for request in run.ended) == list(range(len(LULL)))
    assert sum(request.met for request in run.ended) >= 0.97 * len(LULL)


def test_the_same_seed_gives_the_same_day(lull: Run) -> None:
    """A job whose rounds depend on the order of a set."""
    first, second = lull, Run(LULL)
    assert first.states == second.states
    assert [r.end_s for r in first.ended] == [r.end_s for r in second.ended]


def test_idle_replicas_get_no_requests(lull: Run) -> None:
    """A replica that is offered to training and to the load at once."""
    run = lull
    idle: dict[str, list[tuple[float, float]]] = {}
    for at_s, id_, _, after, _ in run.states:
        if after is ReplicaState.IDLE:
            idle.setdefault(id_, []).append((at_s, inf))
        elif id_ in idle and idle[id_][-1][1] == inf:
            idle[id_][-1] = (idle[id_][-1][0], at_s)
    assert idle
    for request in run.ended:
        assert not any(start < request.released_s < end for start, end in idle.get(request.replica, ()))


def test_a_surge_brings_idle_replicas_back_within_one_macro_cycle() -> None:
    """A promotion that waits for the launcher's next tick: a job that only loads leaves its replicas Idle."""
    never = structs.replace(TRAINING, idle=IdleRules(window=3, return_ticks=1000), apart=True, load_s=1000.0)
    run = Run([Arrival(a.at_s, 50, 10) for a in phases([(10, 15), (150, 4)], seed=1)], never)
    fell = [at_s for at_s, *_, after, _ in run.states if after is ReplicaState.IDLE]
    back = [at_s for at_s, _, before, after, why in run.states if before is ReplicaState.IDLE and "promoted" in why]
    assert fell
    assert back
    assert 15.0 <= back[0] <= 16.0


def test_shared_weights_give_better_answers_sooner_than_training_apart() -> None:
    """Snapshots that reach nobody before the job ends."""
    pair = BatchSizes(4, 8)
    shared = Run(LULL, pair=pair)
    apart = Run(LULL, structs.replace(TRAINING, apart=True, snapshots=False, load_s=5.0), pair)
    middle = [[r.cross_entropy for r in run.ended if 16 < r.arrival_s < 48] for run in (shared, apart)]
    assert sum(middle[0]) / len(middle[0]) < sum(middle[1]) / len(middle[1])
    assert apart.federation.jobs >= 1


def test_fixed_sizes_stay_fixed() -> None:
    """A comparison with fixed pairs in which the solver chooses after all."""
    pair = BatchSizes(3, 5)
    run = Run(LULL, pair=pair)
    trained = {sizes for sizes in run.federation.coordinating.sizes.values() if sizes.train}
    assert trained <= {pair}


def test_the_coordinator_chooses_sizes_at_the_end_of_a_round() -> None:
    """First draws that last for ever, for at a round's end no client trains: B is 1 or 2 then, where 4 and more pay."""
    run = Run(LULL, structs.replace(TRAINING, rules=Rules(rounds=6, steps=5, hyper=Hyperparams(accumulation=2))))
    assert max(sizes.train for sizes in run.chosen) > 2
    assert all(sizes.infer >= 2 for sizes in run.chosen)


@pytest.mark.parametrize(("rounds", "within"), [(DEMO_ROUNDS, 0.01), (UNLIKE_ROUNDS, 0.06)])
def test_the_curve_has_the_shape_of_what_was_measured(rounds: tuple[tuple[float, float], ...], within: float) -> None:
    """A shape that no federated run has shown."""
    curve = fitted(rounds)
    for samples, cross_entropy in rounds:
        assert curve.cross_entropy(samples) == pytest.approx(cross_entropy, abs=within)
    assert curve.samples_to(curve.cross_entropy(50.0)) == pytest.approx(50.0)
    assert curve.samples_to(curve.end) == inf


def test_a_batch_at_the_noise_scale_is_worth_half() -> None:
    """Efficiency that forgets the noise scale."""
    assert effective(100.0, 128.0, 128.0) == 50.0
