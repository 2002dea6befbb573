"""From what is known of a model's replicas to sizes: the load that is left, the next probe, the pace in danger."""

from __future__ import annotations

import pytest

from collm_common.latency import LatencyModel, Line
from collm_common.types import BatchSizes, ReplicaState, Slo
from collm_coordinator.advisor import Member, Rules, choose, first_sizes, probe, rate_to_carry, slowed
from collm_coordinator.replica_model import ReplicaModel
from collm_coordinator.traffic import Traffic

RULES = Rules(Slo("s", e2e_s=2.0), max_train_batch=8)
LAW = LatencyModel(
    Line(0.01, 0.001, 0.004, sequence_identified=True, train_identified=True),
    Line(0.1, per_train_s=0.05),
    output_tokens=20,
    alone=Line(0.01, 0.001),
)


def member(id_: str, state: ReplicaState, rate: float = 0.0, law: LatencyModel | None = LAW) -> Member:
    model = ReplicaModel(laws={} if law is None else {1.0: law})
    model.traffic = Traffic(finished=10 * rate, elapsed_s=10.0)
    return Member(id_, state, 32, model)


def test_a_job_begins_with_what_an_earlier_one_has_told() -> None:
    """A random batch at the start of every job, though the best one is known; or a share that is never measured."""
    known = member("t", ReplicaState.COMBINED)
    best = choose(known, LAW, RULES, 0.0).sizes
    assert {first_sizes(str(seed), known, RULES, 0.0, 8) for seed in range(8)} == {best}
    known.model.shares = (1.0, 0.3)
    drawn = [first_sizes(str(seed), known, RULES, 0.0, 8, number=seed) for seed in range(8)]
    assert len({sizes.train for sizes in drawn}) > 1
    assert [sizes.sm_share for sizes in drawn] == [0.3, 1.0] * 4


def test_replicas_that_train_carry_what_the_serving_ones_leave_over() -> None:
    """Training beside a load that nobody carries, or held back for one that is carried elsewhere."""
    serving, training = member("s", ReplicaState.SERVING, 5.0), member("t", ReplicaState.COMBINED, 20.0)
    alone = rate_to_carry("t", [training], 0, RULES)
    assert alone >= 20 * 1.2
    both = rate_to_carry("t", [serving, training], 0, RULES)
    assert both == 0, "32 sequences at 42 ms an iteration are 38 requests a second here, and as many there"
    assert rate_to_carry("t", [serving, training], 200, RULES) > 0, "a backlog is to be gone in two seconds"


def test_nothing_is_asked_for_while_capacity_is_unknown() -> None:
    """A division of the load by guesswork."""
    unknown = member("s", ReplicaState.SERVING, 20.0, law=None)
    assert rate_to_carry("t", [unknown, member("t", ReplicaState.COMBINED, 90.0)], 50, RULES) == 0


def test_a_choice_keeps_to_what_memory_takes() -> None:
    """A batch for which the trainer has no memory."""
    training = member("t", ReplicaState.COMBINED)
    training.model.progress.noise_scale = 1e6
    assert choose(training, LAW, RULES, 0.0).sizes.train == 8
    training.model.progress.largest = 3
    assert choose(training, LAW, RULES, 0.0).sizes.train == 3


def test_only_shares_that_the_trainer_can_be_given_are_chosen() -> None:
    """A share that the replica cannot set: the law of another machine."""
    training = member("t", ReplicaState.COMBINED)
    training.model.laws[0.3] = LatencyModel(Line(0.01), Line(0.01), sm_share=0.3)
    assert choose(training, LAW, RULES, 0.0).sizes.sm_share == 1.0
    training.model.shares = (0.3, 1.0)
    assert choose(training, LAW, RULES, 0.0).sizes.sm_share == 0.3
    assert choose(training, LAW, RULES, 0.0, within_round=True).sizes.sm_share == 1.0


def test_a_pace_that_is_slower_leaves_room_for_less() -> None:
    """A factor applied to the wrong line: iterations alone are as fast as ever."""
    pace = slowed(LAW, 2.0)
    assert pace.iteration_s(2, 4) == pytest.approx(2 * LAW.iteration_s(2, 4))
    assert pace.iteration_s(0, 4) == LAW.iteration_s(0, 4)
    assert choose(member("t", ReplicaState.COMBINED), pace, RULES, 0.0).sizes.infer <= 32


def measured(*trains: int) -> ReplicaModel:
    model = ReplicaModel()
    for train in trains:
        for infer in (2, 3):
            model.infer.add(BatchSizes(train, infer), 0.01 + 0.01 * train)
    return model


def test_probes_double_the_batch_until_a_law_says_what_it_costs() -> None:
    """A first round whose third step takes sixteen times as long, beside requests."""
    asked: set[tuple[int, int]] = set()
    model = measured(1)
    ran = [1]
    while (found := probe(model, [model], asked, RULES)) is not None:
        assert found.sizes.train <= 2 * max(ran)
        asked.add((found.sizes.train, found.sizes.infer))
        ran.append(found.sizes.train)
        model = measured(*ran)
    assert sorted(set(ran)) == [1, 2, 4, 8]


def test_replicas_share_their_probes() -> None:
    """Three replicas that each measure what the others have measured already."""
    one, other = measured(1, 8), measured(2, 4)
    assert probe(one, [one, other], set(), RULES) is None
    assert probe(one, [one], set(), RULES) is not None


def test_nothing_is_probed_that_breaks_the_slo() -> None:
    """Requests that are late for the sake of a fit."""
    model = measured(1)
    model.laws[1.0] = LatencyModel(Line(0.0, per_train_s=0.03), Line(0.1), output_tokens=20)
    found = probe(model, [model], set(), RULES)
    assert found is not None
    assert found.sizes.train == 2
    model = measured(1, 2)
    model.laws[1.0] = LatencyModel(Line(0.0, per_train_s=0.03), Line(0.1), output_tokens=20)
    assert probe(model, [model], set(), RULES) is None
