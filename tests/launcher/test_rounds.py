"""Federated rounds: whatever happens to clients, server or candidate, a round ends and the job goes on or ends."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collm_common.messages import (
    Aggregate,
    Aggregated,
    Evaluate,
    Evaluated,
    Hyperparams,
    JobChanged,
    LoadAdapter,
    StateChanged,
    StopTraining,
    TaskFailed,
    TrainRound,
    UpdateUploaded,
)
from collm_common.types import BatchSizes, Quality, ReplicaInfo, ReplicaState
from collm_launcher.policy.gate import compare
from collm_launcher.policy.job import Action, Announce, Clean, Forget, Job, Phase, Publish, Return, Rules, Score, Send
from collm_launcher.policy.phases import train
from collm_launcher.policy.rounds import choose, form, on_event, on_tick, pause, resume, start

RULES = Rules(rounds=2, steps=8, patience=0)
IDS = ("r1", "r2", "r3")


def info(id_: str, **changes: object) -> ReplicaInfo:
    base = ReplicaInfo(id_, "m", "i", ReplicaState.IDLE, ready=True, infer_batch_max=8, context_tokens=64)
    return msgspec.structs.replace(base, **changes)


class Driver:
    """Feeds a job by its own actions' meaning, and stores and restores it between any two events."""

    def __init__(self, rules: Rules = RULES, version: int = 0, qualities: tuple[float, ...] = (1.0, 2.0, 1.5)) -> None:
        members = [info(id_, quality=q) for id_, q in zip(IDS, qualities, strict=True)]
        self.now = 0.0
        self.job, self.actions = start("j", self.now, members, "desk", version, version + 1, rules, seed=7)
        self.usable = set(IDS)

    def same(self, step: Callable[[Job], list[Action]]) -> list[Action]:
        """What a job does that was stored and restored just now, which is what one in memory does."""
        restored = msgspec.msgpack.decode(msgspec.msgpack.encode(self.job), type=Job)
        self.actions = step(self.job)
        assert repr(step(restored)) == repr(self.actions)
        assert msgspec.msgpack.encode(restored) == msgspec.msgpack.encode(self.job)
        self.job = restored
        return self.actions

    def event(self, event: object) -> list[Action]:
        return self.same(lambda job: on_event(job, self.now, event))

    def tick(self, seconds: float = 0.0) -> list[Action]:
        self.now += seconds
        return self.same(lambda job: on_tick(job, self.now, self.usable))

    def join(self) -> None:
        for id_ in IDS:
            self.state(id_, ReplicaState.IDLE, ReplicaState.COMBINED)

    def state(self, id_: str, before: ReplicaState, after: ReplicaState) -> list[Action]:
        return self.event(StateChanged(replica=id_, before=before, after=after, reason="x", time_s=self.now))

    def upload(self, id_: str, loss: float = 2.0, samples: int = 32) -> list[Action]:
        return self.event(
            UpdateUploaded(
                job="j", round=self.job.round, replica=id_, samples=samples, loss=loss, loss_last=loss, time_s=0.0
            )
        )

    def measure(self, id_: str, version: int, loss: float, tokens: int = 10) -> list[Action]:
        quality = Quality(loss, tokens)
        return self.event(
            Evaluated(job="j", round=1, replica=id_, adapter="desk", version=version, quality=quality, time_s=0.0)
        )

    def aggregated(self, version: int | None = None, **refused: str) -> list[Action]:
        return self.event(
            Aggregated(
                job="j",
                round=self.job.round,
                adapter="desk",
                version=self.job.candidate if version is None else version,
                residual=0.1,
                refused=refused,
                time_s=0.0,
            )
        )

    def fail(self, id_: str, task: str) -> list[Action]:
        return self.event(
            TaskFailed(job="j", round=self.job.round, replica=id_, task=task, reason="no", time_s=self.now)
        )

    def round(self, after: float, loss: float = 2.0, before: float | None = None) -> list[Action]:
        for id_ in self.job.clients:
            if before is not None:
                self.measure(id_, self.job.version, before)
            self.upload(id_, loss)
        self.aggregated()
        for id_ in list(self.job.clients):
            self.measure(id_, self.job.candidate, after)
        return self.actions


def sent(actions: list[Action], type_: type) -> dict[str, object]:
    return {
        action.replica: action.command
        for action in actions
        if isinstance(action, Send) and isinstance(action.command, type_)
    }


def said(actions: list[Action]) -> list[str]:
    return [a.event.reason for a in actions if isinstance(a, Announce) and isinstance(a.event, JobChanged)]


def of(actions: list[Action], type_: type) -> list[Action]:
    return [action for action in actions if isinstance(action, type_)]


def test_three_idle_replicas_on_the_same_weights_are_needed_to_start() -> None:
    """A job over replicas of different bases, busy ones, or too few."""
    idle = [info(f"r{n}") for n in range(3)]
    assert [one.id for one in choose(idle, RULES)] == ["r0", "r1", "r2"]
    assert choose(idle[:2], RULES) == []
    for change in (
        {"base_digest": "x"},
        {"ready": False},
        {"alive": False},
        {"job": "k"},
        {"state": ReplicaState.SERVING},
    ):
        assert choose([*idle[:2], info("r2", **change)], RULES) == []


def test_a_replica_that_trains_at_a_lower_rank_joins_where_products_are_combined() -> None:
    """A small replica kept out for nothing, sent what it cannot train, or made to learn at another scale."""
    members = [info(f"r{n}", train_rank=rank) for n, rank in enumerate((1024, 2, 8))]
    product = Rules(strategy="product", hyper=Hyperparams(rank=8, alpha=16.0))
    assert choose(members, RULES) == []
    assert len(choose(members, product)) == 3
    job, _ = start("j", 0.0, members, "desk", 0, 1, product, seed=0)
    sent_out = [action.command for action in train(job, 0.0) if isinstance(action, Send)]
    hypers = [command.hyper for command in sent_out if isinstance(command, TrainRound)]
    assert [(hyper.rank, hyper.alpha) for hyper in hypers] == [(8, 16.0), (2, 4.0), (8, 16.0)]
    assert {command.hyper.rank for command in sent_out if isinstance(command, Evaluate)} == {8}


def test_the_best_replica_serves_and_ties_go_by_id() -> None:
    """A server that two launchers would choose differently."""
    assert Driver(qualities=(1.0, 2.0, 1.5)).job.server == "r2"
    assert Driver(qualities=(1.0, 1.0, 1.0)).job.server == "r1"


def test_a_whole_job_of_two_rounds() -> None:
    """The order of a round: train, aggregate, measure, publish; the next one starts from what was accepted."""
    driver = Driver()
    driver.job.sizes = {"r1": BatchSizes(4, 2)}
    driver.join()
    assert driver.job.phase is Phase.TRAINING
    assert set(sent(driver.actions, Evaluate)) == set(IDS)
    commands = sent(driver.actions, TrainRound)
    assert set(commands) == set(IDS)
    first = commands["r1"]
    assert isinstance(first, TrainRound)
    assert (first.start, first.first_step, first.total_steps, first.sizes, first.seed) == (
        0,
        0,
        16,
        BatchSizes(4, 2),
        7,
    )
    for id_ in IDS:
        driver.measure(id_, 0, 3.0)
        driver.upload(id_)
    (server, command), *rest = sent(driver.actions, Aggregate).items()
    assert (server, rest) == ("r2", [])
    assert isinstance(command, Aggregate)
    assert (command.version, command.parent, command.clients) == (1, 0, IDS)
    driver.aggregated()
    assert of(driver.actions, Clean) == [Clean(1, IDS)]
    assert set(sent(driver.actions, Evaluate)) == set(IDS)
    for id_ in IDS:
        driver.measure(id_, 1, 2.0)
    assert of(driver.actions, Publish) == [Publish(1, 3.0, 2.0)]
    second = sent(driver.actions, TrainRound)["r3"]
    assert isinstance(second, TrainRound)
    assert (second.round, second.start, second.first_step) == (2, 1, 8)
    assert sent(driver.actions, Evaluate) == {}
    driver.round(after=1.5)
    assert of(driver.actions, Publish) == [Publish(2, 2.0, 1.5, parent=1)]
    assert {action.replica for action in driver.actions if isinstance(action, Return)} == set(IDS)
    assert (driver.job.phase, driver.job.accepted) == (Phase.DONE, 2)
    assert driver.event(None) == driver.tick(1e9) == []


def test_a_worse_candidate_is_not_published_and_the_next_round_starts_from_the_last_good_one() -> None:
    """A round that makes answers worse, and is served."""
    driver = Driver(Rules(rounds=5, patience=0, max_rejected=2), version=4)
    driver.join()
    driver.round(before=2.0, after=2.5)
    assert of(driver.actions, Publish) == []
    assert sent(driver.actions, LoadAdapter) == {id_: LoadAdapter(name="desk", version=4) for id_ in IDS}
    again = sent(driver.actions, TrainRound)["r1"]
    assert isinstance(again, TrainRound)
    assert again.start == 4
    driver.round(after=2.2)
    assert driver.job.phase is Phase.DONE
    assert driver.job.next_version == 7


def test_equal_is_not_worse() -> None:
    """A gate that rejects a round which changed nothing measurable."""
    driver = Driver()
    driver.join()
    driver.round(before=2.0, after=2.0)
    assert driver.job.accepted == 1


def test_the_gate_weighs_tokens_of_clients_that_measured_both() -> None:
    """A mean over different clients before and after, or one that counts a short set as much as a long one."""
    before = {"a": Quality(1.0, 10), "b": Quality(2.0, 30), "c": Quality(9.0, 99)}
    after = {"a": Quality(2.0, 10), "b": Quality(1.0, 30), "d": Quality(0.1, 99)}
    assert list(compare(before, after)) == pytest.approx([1.75, 1.25])
    assert compare({}, after) == (None, None)


def test_a_client_that_dies_costs_its_update_and_not_the_round() -> None:
    """A round that waits for a dead client, or aggregates what it left."""
    driver = Driver()
    driver.join()
    driver.upload("r1")
    driver.upload("r3")
    driver.usable.discard("r2")
    driver.tick()
    command = sent(driver.actions, Aggregate)["r3"]
    assert isinstance(command, Aggregate)
    assert command.clients == ("r1", "r3")


def test_a_recalled_client_leaves_and_its_server_role_moves() -> None:
    """Requests that need the replica, held up by a job that does not let go."""
    driver = Driver()
    driver.join()
    driver.state("r2", ReplicaState.COMBINED, ReplicaState.SERVING)
    assert set(driver.job.clients) == {"r1", "r3"}
    assert driver.job.server == "r3"
    assert isinstance(sent(driver.actions, StopTraining)["r2"], StopTraining)


def test_a_server_that_dies_or_fails_while_it_aggregates_is_replaced() -> None:
    """Updates that are lost because one replica of three is gone."""
    driver = Driver()
    driver.join()
    for id_ in IDS:
        driver.upload(id_)
    driver.fail("r2", "aggregate")
    assert set(sent(driver.actions, Aggregate)) == {"r3"}
    driver.usable.discard("r3")
    driver.tick()
    assert set(sent(driver.actions, Aggregate)) == {"r1"} or set(sent(driver.actions, Aggregate)) == {"r2"}


def test_a_server_that_is_merely_slow_does_not_write_over_its_successor() -> None:
    """Two servers that write one version at once, or a late one whose version stays in memory for ever."""
    driver = Driver()
    driver.join()
    for id_ in IDS:
        driver.upload(id_)
    slow = driver.job.candidate
    driver.tick(driver.job.rules.aggregate_s)
    (command,) = sent(driver.actions, Aggregate).values()
    assert isinstance(command, Aggregate)
    assert command.version == driver.job.candidate != slow
    assert of(driver.actions, Forget) == [Forget(slow)]
    assert driver.aggregated(slow) == [Forget(slow)]
    driver.aggregated()
    assert driver.job.phase is Phase.EVALUATING
    assert driver.aggregated(slow) == [Forget(slow)]
    assert driver.aggregated() == [], "said twice: it is still being judged"


def test_an_update_that_diverged_is_left_out() -> None:
    """One client's NaN that becomes everybody's adapter."""
    driver = Driver()
    driver.join()
    driver.upload("r1", loss=float("nan"))
    driver.upload("r2")
    driver.upload("r3")
    (command,) = sent(driver.actions, Aggregate).values()
    assert isinstance(command, Aggregate)
    assert command.clients == ("r2", "r3")


def test_a_refused_update_is_named_and_the_round_goes_on_without_it() -> None:
    """A poisoned client that ends the round of the others, or whose loss still counts in their scores."""
    driver = Driver()
    driver.join()
    for id_, loss in (("r1", 2.0), ("r2", 1e-9), ("r3", 2.0)):
        driver.upload(id_, loss)
    driver.aggregated(r2="not finite")
    assert "the update of r2 is refused: not finite" in said(driver.actions)
    assert driver.job.phase is Phase.EVALUATING
    assert set(driver.job.uploads) == {"r1", "r3"}
    for version, loss in ((0, 4.0), (1, 3.0)):
        for id_ in IDS:
            driver.measure(id_, version, loss)
    assert {a.replica: a.quality for a in driver.actions if isinstance(a, Score)} == {"r1": 2.0, "r3": 3.0}


def test_a_round_of_which_too_little_could_be_used_is_discarded() -> None:
    """A candidate made of one client's update that is judged as everybody's."""
    driver = Driver(Rules(rounds=9, max_rejected=2))
    driver.join()
    for id_ in IDS:
        driver.upload(id_)
    driver.aggregated(r1="norm", r2="norm")
    assert (driver.job.phase, driver.job.round, driver.job.rejected) == (Phase.TRAINING, 2, 1)
    assert Forget(1) in driver.actions
    assert Clean(1, IDS) in driver.actions


@pytest.mark.parametrize("after", [float("nan"), float("inf")])
def test_a_candidate_without_a_finite_loss_is_not_published(after: float) -> None:
    """A comparison that NaN passes because it is not above anything."""
    driver = Driver(Rules(rounds=1))
    driver.join()
    driver.round(before=2.0, after=after)
    assert of(driver.actions, Publish) == []
    assert driver.job.accepted == 0


@pytest.mark.parametrize("before", [float("nan"), None])
def test_a_start_without_a_finite_loss_scores_nobody(before: float | None) -> None:
    """A score that is not a number, and stays so."""
    driver = Driver(Rules(rounds=1))
    driver.join()
    driver.round(before=before, after=1.0)
    assert of(driver.actions, Score) == []
    assert of(driver.actions, Publish) == []


def test_nobody_who_can_aggregate_discards_the_round() -> None:
    """An aggregation that is tried for ever."""
    driver = Driver(Rules(rounds=5, max_rejected=1))
    driver.join()
    for id_ in IDS:
        driver.upload(id_)
    for _ in range(3):
        driver.fail(driver.job.server, "aggregate")
    assert driver.job.phase is Phase.DONE
    assert of(driver.actions, Clean)


def test_stragglers_are_left_behind_at_the_deadline_if_there_is_a_quorum() -> None:
    """One slow client that holds up all others."""
    driver = Driver()
    driver.join()
    driver.upload("r1")
    driver.upload("r2")
    assert driver.tick(driver.job.rules.train_s - 1) == []
    driver.tick(1)
    assert driver.job.phase is Phase.AGGREGATING
    assert set(sent(driver.actions, StopTraining)) == {"r3"}
    driver.aggregated()
    assert set(sent(driver.actions, Evaluate)) == set(IDS)


def test_a_round_below_the_quorum_is_discarded_and_too_many_end_the_job() -> None:
    """An average of one client's weights that is called federated, or rounds that fail for ever."""
    driver = Driver(Rules(rounds=9, max_rejected=2))
    driver.join()
    driver.upload("r1")
    driver.tick(driver.job.rules.train_s)
    assert (driver.job.phase, driver.job.round, driver.job.rejected) == (Phase.TRAINING, 2, 1)
    assert sent(driver.actions, LoadAdapter) == {id_: LoadAdapter(name="desk", version=0) for id_ in IDS}
    assert of(driver.actions, Clean) == [Clean(1, IDS)]
    driver.tick(driver.job.rules.train_s)
    assert driver.job.phase is Phase.DONE
    assert len(of(driver.actions, Return)) == 3


def test_failed_clients_are_not_waited_for() -> None:
    """A deadline that is sat out though everybody knows that the update will not come."""
    driver = Driver()
    driver.join()
    driver.fail("r3", "train_round")
    driver.upload("r1")
    driver.upload("r2")
    assert driver.job.phase is Phase.AGGREGATING
    driver.aggregated()
    driver.fail("r3", "evaluate")
    driver.measure("r1", 0, 3.0)
    driver.measure("r1", 1, 2.0)
    driver.measure("r2", 1, 2.0)
    assert driver.job.accepted == 1


def test_a_candidate_that_nobody_measured_in_time_is_rejected() -> None:
    """A version published blindly."""
    driver = Driver(Rules(rounds=1))
    driver.join()
    for id_ in IDS:
        driver.upload(id_)
    driver.aggregated()
    driver.tick(driver.job.rules.evaluate_s)
    assert of(driver.actions, Publish) == []
    assert driver.job.phase is Phase.DONE


def test_replicas_that_do_not_join_let_the_job_go() -> None:
    """Idle replicas held by a job that never begins."""
    driver = Driver()
    driver.state("r1", ReplicaState.IDLE, ReplicaState.COMBINED)
    driver.tick(driver.job.rules.form_s)
    assert driver.job.phase is Phase.FAILED
    assert {(a.replica, a.before) for a in driver.actions if isinstance(a, Return)} == {
        ("r1", ReplicaState.COMBINED),
        ("r2", ReplicaState.IDLE),
        ("r3", ReplicaState.IDLE),
    }


def test_enough_that_joined_begin_without_the_late_one() -> None:
    """A fourth replica whose absence stops three."""
    driver = Driver(Rules(min_clients=2))
    for id_ in ("r1", "r2"):
        driver.state(id_, ReplicaState.IDLE, ReplicaState.COMBINED)
    driver.tick(driver.job.rules.form_s)
    assert set(sent(driver.actions, TrainRound)) == {"r1", "r2"}
    assert [a for a in driver.actions if isinstance(a, Return)] == [
        Return("r3", ReplicaState.IDLE, "did not join in time")
    ]


def test_the_last_client_that_leaves_ends_the_job() -> None:
    """A job without anyone in it that stays open."""
    driver = Driver()
    driver.usable.clear()
    driver.tick()
    assert driver.job.phase is Phase.FAILED


def test_a_lost_client_before_training_lets_enough_others_begin() -> None:
    """A job that waits to the deadline for one who is known to be gone, or that begins with too few."""
    for min_clients, phase in ((2, Phase.TRAINING), (3, Phase.FAILED)):
        driver = Driver(Rules(min_clients=min_clients))
        for id_ in ("r1", "r2"):
            driver.state(id_, ReplicaState.IDLE, ReplicaState.COMBINED)
        driver.state("r3", ReplicaState.IDLE, ReplicaState.SERVING)
        assert driver.job.phase is phase


def test_news_of_how_a_client_became_idle_is_no_recall() -> None:
    """A job that loses its clients to the event that made them eligible."""
    driver = Driver()
    driver.state("r1", ReplicaState.SERVING, ReplicaState.IDLE)
    assert set(driver.job.clients) == set(IDS)


def test_a_start_that_cannot_be_measured_rejects_the_candidate() -> None:
    """A comparison with nothing, or a crash on a set without tokens."""
    driver = Driver(Rules(rounds=1))
    driver.join()
    for id_ in IDS:
        driver.measure(id_, 0, 1.0, tokens=0)
        driver.upload(id_)
    driver.aggregated()
    for id_ in IDS:
        driver.measure(id_, 1, 1.0)
    assert of(driver.actions, Forget) == [Forget(1)]
    assert driver.job.phase is Phase.DONE


def test_quality_follows_the_falling_loss_within_bounds() -> None:
    """A score that rises when training gets worse, or that one odd loss makes useless."""
    driver = Driver(Rules(rounds=9, patience=0), qualities=(1.0, 1.0, 1.0))
    driver.join()
    driver.round(before=4.0, after=3.0, loss=2.0)
    assert {a.quality for a in driver.actions if isinstance(a, Score)} == {2.0}
    driver.round(after=2.0, loss=4.0)
    assert {a.quality for a in driver.actions if isinstance(a, Score)} == {1.0}
    driver.round(after=1.0, loss=1e-6)
    assert {a.quality for a in driver.actions if isinstance(a, Score)} == {10.0}


def test_a_client_whose_loss_stays_leaves_and_the_rest_go_on_down_to_one() -> None:
    """Early stop that never stops, or that ends the job for everyone."""
    driver = Driver(Rules(rounds=9, patience=1, min_fall=0.01))
    driver.join()
    driver.round(before=9.0, after=3.0)
    for id_ in IDS:
        driver.upload(id_, loss=1.0 if id_ == "r1" else 2.0)
    driver.aggregated()
    for id_ in IDS:
        driver.measure(id_, driver.job.candidate, 2.0)
    assert set(driver.job.clients) == {"r1"}
    assert driver.job.server == "r1"
    assert {a.replica for a in driver.actions if isinstance(a, Return)} == {"r2", "r3"}
    driver.upload("r1", loss=1.0)
    assert set(sent(driver.actions, Aggregate)) == {"r1"}
    driver.aggregated()
    driver.measure("r1", driver.job.candidate, 1.0)
    assert driver.job.phase is Phase.DONE


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.TRAINING, Phase.AGGREGATING, Phase.EVALUATING])
def test_a_pause_frees_every_client_and_costs_no_round(phase: Phase) -> None:
    """A client that nobody gives back, a candidate that stays, or a job with a round less for every pause."""
    run = Driver()
    if phase is not Phase.FORMING:
        run.join()
    if phase in (Phase.AGGREGATING, Phase.EVALUATING):
        for id_ in IDS:
            run.upload(id_)
    if phase is Phase.EVALUATING:
        run.event(Aggregated(job="j", round=1, adapter="desk", version=1, residual=0.0, time_s=0.0))
    assert run.job.phase is phase
    actions = run.same(lambda job: pause(job, run.now))
    assert {action.replica for action in actions if isinstance(action, Return)} == set(IDS)
    assert Forget(1) in actions or phase in (Phase.FORMING, Phase.TRAINING)
    assert run.tick(10_000) == []
    assert run.same(lambda job: pause(job, run.now)) == []
    run.same(lambda job: resume(job, run.now))
    assert run.job.phase is Phase.WAITING
    assert run.tick(10_000) == []
    run.same(lambda job: form(job, run.now, [info(id_) for id_ in IDS[:3]]))
    run.join()
    trained = [action.command for action in run.actions if isinstance(action, Send)]
    assert {command.first_step for command in trained if isinstance(command, TrainRound)} == {0}
    assert (run.job.phase, run.job.turn) == (Phase.TRAINING, 1)


def test_what_belongs_to_another_job_or_round_is_ignored() -> None:
    """A late update of the round before that is averaged into this one."""
    driver = Driver()
    driver.join()
    foreign = UpdateUploaded(job="k", round=1, replica="r1", samples=1, loss=1.0, loss_last=1.0, time_s=0.0)
    late = UpdateUploaded(job="j", round=9, replica="r1", samples=1, loss=1.0, loss_last=1.0, time_s=0.0)
    stranger = UpdateUploaded(job="j", round=1, replica="r9", samples=1, loss=1.0, loss_last=1.0, time_s=0.0)
    assert driver.event(foreign) == driver.event(late) == driver.event(stranger) == []
    assert driver.job.uploads == {}
    assert driver.aggregated() == []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_happens_a_job_ends_and_lets_every_client_go(data: st.DataObject) -> None:
    """Any order of events, deaths, failures and silences that leaves a job hanging or a client held for ever."""
    driver = Driver(Rules(rounds=3, patience=1, canary_s=data.draw(st.sampled_from([0.0, 500.0]))))
    let_go: set[str] = set()
    published: set[int] = {0}
    serves = dict.fromkeys(IDS, 0)
    for _ in range(200):
        if driver.job.ended:
            break
        what = data.draw(st.sampled_from(["join", "upload", "aggregated", "measure", "fail", "die", "recall", "wait"]))
        id_ = data.draw(st.sampled_from(IDS))
        match what:
            case "join":
                driver.state(id_, ReplicaState.IDLE, ReplicaState.COMBINED)
            case "upload":
                driver.upload(id_, data.draw(st.floats(0.1, 5) | st.just(float("nan"))))
            case "aggregated":
                driver.aggregated(data.draw(st.integers(1, max(1, driver.job.candidate))))
            case "measure":
                loss = data.draw(st.sampled_from([0.5, 1.0, float("nan")]))
                driver.measure(id_, data.draw(st.sampled_from([driver.job.version, driver.job.candidate])), loss)
            case "fail":
                driver.fail(id_, data.draw(st.sampled_from(["train_round", "aggregate", "evaluate"])))
            case "die":
                driver.usable.discard(id_)
                driver.tick()
            case "recall":
                driver.state(id_, ReplicaState.COMBINED, ReplicaState.SERVING)
            case "wait":
                driver.tick(1000.0)
        let_go |= released(driver.actions)
        published |= {a.version for a in driver.actions if isinstance(a, Publish)}
        assert not published & {a.version for a in driver.actions if isinstance(a, Forget)}, "a served one is deleted"
        serve(serves, driver.actions)
    for _ in range(40):
        let_go |= released(driver.tick(1000.0))
        published |= {a.version for a in driver.actions if isinstance(a, Publish)}
        serve(serves, driver.actions)
    assert driver.job.ended
    assert let_go == set(IDS)
    assert driver.job.version == 0 or driver.job.accepted
    assert set(serves.values()) <= published, "a candidate that nobody accepted goes on serving"


def serve(serves: dict[str, int], actions: list[Action]) -> None:
    """Which version each replica serves after these."""
    for action in actions:
        if isinstance(action, Publish):
            serves.update(dict.fromkeys(serves, action.version))
        elif isinstance(action, Send) and isinstance(action.command, LoadAdapter):
            serves[action.replica] = action.command.version


def released(actions: list[Action]) -> set[str]:
    """Who is free of the job: returned, or announced as lost."""
    lost = {reason.split(" left: ")[0] for reason in said(actions) if " left: " in reason}
    return lost | {a.replica for a in actions if isinstance(a, Return)}
