"""What is known of one replica: traffic, samples, and slopes borrowed from its peers."""

from __future__ import annotations

import msgspec
import pytest

from collm_common.messages import InferenceReport, Iteration, Served, TrainReport
from collm_common.types import BatchSizes, ReplicaState, Slo
from collm_coordinator.replica_model import ReplicaModel


def served(time_s: float = 1.0, cells: tuple[tuple[int, int, float], ...] = (), **counts: float) -> InferenceReport:
    values: dict[str, object] = {"queue": 0, "prefill_tokens": 0, "output_tokens": 0, "finished": 0, **counts}
    return InferenceReport(
        replica="r",
        state=ReplicaState.SERVING,
        time_s=time_s,
        utilisation=0.5,
        memory_bytes=1,
        running=1,
        mean_batch=1,
        limit=16,
        train_batch=0,
        iterations=tuple(Iteration(BatchSizes(train, infer), 5, seconds) for train, infer, seconds in cells),
        **values,  # type: ignore[arg-type]
    )


def trained(train: int, infer: int, step_s: float, noise_scale: float | None = None) -> TrainReport:
    return TrainReport(
        replica="r",
        job="j",
        round=1,
        step=1,
        time_s=1.0,
        sizes=BatchSizes(train, infer),
        step_s=step_s,
        samples=train,
        loss=1.0,
        noise_scale=noise_scale,
    )


SERVING_CELLS = tuple((0, infer, 0.01 + 0.001 * infer) for infer in (1, 2, 4, 8))


def model(*steps: tuple[int, int, float]) -> ReplicaModel:
    made = ReplicaModel()
    made.observe_inference(served(cells=SERVING_CELLS))
    for step in steps:
        made.observe_training(trained(*step))
    return made


def test_traffic_is_averaged_over_requests_and_queueing_follows_littles_law() -> None:
    """Lengths of a request divided by the number of reports, or a wait that is a queue length."""
    one = ReplicaModel()
    for second in range(1, 101):
        counts = {"queue": 6, "finished": 3, "prefill_tokens": 300, "prefill_s": 0.6, "output_tokens": 60}
        one.observe_inference(served(float(second), (), **counts))
    traffic = one.traffic
    assert traffic.mean_prompt_tokens == pytest.approx(100)
    assert traffic.mean_output_tokens == pytest.approx(20)
    assert traffic.prefill_s_per_token == pytest.approx(0.002)
    assert traffic.queue_s == pytest.approx(2, rel=0.02)


def test_without_traffic_nothing_is_claimed() -> None:
    """A division by nothing before the first request."""
    traffic = ReplicaModel().traffic
    assert (traffic.queue_s, traffic.mean_prompt_tokens, traffic.mean_output_tokens) == (0, 0, 1)
    assert traffic.prefill_s_per_token == 0


def test_peers_tell_how_training_time_grows() -> None:
    """Rounds without any sizes because each replica has only tried one batch itself."""
    replicas = [model((batch, infer, 0.5 + 0.1 * batch)) for batch, infer in ((1, 8), (2, 6), (4, 8), (6, 7))]
    assert replicas[0].refit(replicas) is None
    fitted = replicas[0].latency
    assert fitted is not None
    assert fitted.micro_step_s(8, 8) == pytest.approx(1.3, rel=0.01)


def test_its_own_samples_come_before_those_of_its_peers() -> None:
    """A slow replica that is given the batch sizes of fast ones."""
    slow = model(*((batch, infer, 5.0 + batch + 0.01 * infer) for batch in (1, 2, 4) for infer in (2, 8)))
    fast = model(*((batch, infer, 0.1) for batch in (1, 2, 4) for infer in (2, 8)))
    slow.refit([slow, fast])
    assert slow.latency is not None
    assert slow.latency.micro_step_s(4, 8) == pytest.approx(9.08, rel=0.01)


def test_alone_with_one_batch_it_guesses_in_proportion() -> None:
    """A first round after which nothing is known."""
    one = model((2, 8, 1.0))
    one.refit([one])
    assert one.latency is not None
    assert one.latency.train is not None
    assert one.latency.micro_step_s(4, 8) == pytest.approx(2.0)
    assert not one.latency.train.train_identified


def test_nothing_is_fitted_twice_and_a_refusal_keeps_what_was_known() -> None:
    """Work without news, or a model that is lost to one bad moment."""
    one = model()
    assert one.refit([one]) is None
    before = one.latency
    assert before is not None
    assert before.train is None
    assert one.refit([one]) is None
    assert one.latency is before
    assert one.refit([one]) is None
    empty = ReplicaModel()
    refusal = empty.refit([empty])
    assert refusal is not None
    assert empty.latency is None


def test_training_beside_does_not_enter_the_serving_model() -> None:
    """A serving replica that is thought as slow as it was while it trained."""
    one = model()
    one.observe_inference(served(cells=tuple((4, infer, 0.1) for infer in (1, 2, 4, 8))))
    one.refit([one])
    assert one.latency is not None
    assert one.latency.iteration_s(0, 4) == pytest.approx(0.014, rel=0.05)


def test_noise_scale_and_first_batch_are_kept() -> None:
    """An efficiency that compares with the present batch, or a noise scale from one infinite estimate."""
    one = ReplicaModel()
    for report in (trained(2, 4, 1.0, 30.0), trained(4, 4, 1.0, float("inf")), trained(4, 4, 1.0)):
        one.observe_training(report)
    assert (one.progress.first_batch, one.progress.noise_scale) == (2, 30.0)


def test_a_training_step_counts_for_the_batch_that_ran_beside_it() -> None:
    """Steps of a replica with little traffic taken for steps beside a full batch: training looks free of its cost."""
    model = ReplicaModel()
    model.observe_training(trained(4, 8, 0.1))
    model.observe_inference(msgspec.structs.replace(served(), mean_batch=2.6))
    model.observe_training(trained(4, 8, 0.2))
    assert {(point.train, point.infer): point.seconds for point in model.train.points()} == {(4, 8): 0.1, (4, 3): 0.2}


def test_each_sm_share_has_a_law_of_its_own() -> None:
    """A trainer limited to a third of the SMs, thought as much in the way as one without a limit."""
    one = ReplicaModel()
    for share, slope in ((0.3, 0.001), (1.0, 0.02)):
        cells = [(train, infer) for train in (1, 2, 4, 8) for infer in (1, 8)]
        iterations = tuple(
            Iteration(BatchSizes(train, infer, share), 5, 0.01 + slope * train) for train, infer in cells
        )
        one.observe_inference(msgspec.structs.replace(served(), iterations=iterations))
    assert one.refit([one]) is None
    assert one.laws[0.3].iteration_s(8, 1) == pytest.approx(0.018, rel=0.01)
    assert one.laws[1.0].iteration_s(8, 1) == pytest.approx(0.17, rel=0.01)
    assert one.latency is one.laws[1.0], "the share that was heard last"


def test_one_batch_beside_training_is_judged_by_what_it_costs_at_all() -> None:
    """A B that was never varied, taken for free: the next choice is the largest."""
    one = model()
    one.observe_inference(served(cells=tuple((2, infer, 0.03 + 0.001 * infer) for infer in (1, 2, 4, 8))))
    one.refit([one])
    assert one.latency is not None
    assert one.latency.iteration_s(8, 4) >= 0.09
    assert one.latency.iteration_s(0, 4) == pytest.approx(0.014, rel=0.05)


def test_a_lasting_shift_reaches_all_that_was_measured_before() -> None:
    """Batches that nobody ran since the machine became slower, remembered as fast as they were."""
    one = model()
    one.refit([one])
    slower = served(cells=((0, 2, 0.024),))
    drifted = [comparison.drifted for _ in range(3) for comparison in one.observe_inference(slower)]
    assert any(factor == pytest.approx(2.0) for factor in drifted)
    one.refit([one])
    assert one.latency is not None
    assert one.latency.iteration_s(0, 8) == pytest.approx(0.036, rel=0.1)


def test_a_wait_before_the_replica_counts_as_queueing() -> None:
    """A tau' that is the whole SLO while requests grow old in the dispatcher's stream."""
    one = ReplicaModel()
    slo = Slo("s", e2e_s=2.0)
    one.observe_inference(msgspec.structs.replace(served(), served=(Served(slo, 4, 2.0),)))
    assert one.traffic.queue_s == pytest.approx(0.5)
    assert one.objectives.binding(Slo("base"), lambda slo: True).e2e_s == 2.0


def test_a_law_that_was_a_guess_is_no_drift() -> None:
    """Good samples, scaled because the first guess at a batch that was never tried was wrong."""
    one = model((1, 4, 0.6))
    one.refit([one])
    assert [comparison.drifted for comparison in one.observe_training(trained(4, 4, 0.9))] == [None]
    assert {point.train: point.seconds for point in one.train.points()} == {1: 0.6, 4: 0.9}
