"""What training tells: the fall of its loss, and the batches that its memory takes."""

from __future__ import annotations

import pytest

from collm_common.messages import TrainReport
from collm_common.types import BatchSizes
from collm_coordinator.progress import Progress


def step(train: int, loss: float = 1.0, job: str = "j", peak: int = 0, limit: int = 0) -> TrainReport:
    return TrainReport(
        replica="r",
        job=job,
        round=1,
        step=1,
        time_s=1.0,
        sizes=BatchSizes(train, 4),
        step_s=1.0,
        samples=train,
        loss=loss,
        memory_bytes=peak,
        memory_limit_bytes=limit,
    )


def after(*steps: TrainReport) -> Progress:
    progress = Progress()
    for report in steps:
        progress.observe(report)
    return progress


def test_the_fall_of_the_loss_is_its_slope_and_never_negative() -> None:
    """A replica whose loss rises that counts as learning, or one bad step that hides the trend."""
    falling = after(*(step(2, 4.0 - 0.1 * number) for number in range(10)))
    assert falling.loss_fall == pytest.approx(0.1)
    assert after(*(step(2, 1.0 + 0.1 * number) for number in range(10))).loss_fall == 0
    assert after(step(2)).loss_fall is None


def test_another_job_starts_from_nothing() -> None:
    """Losses of one adapter beside those of another: a fall of several nats in one step."""
    progress = after(*(step(2, 4.0) for _ in range(10)), *(step(4, 1.0, job="k") for _ in range(5)))
    assert progress.loss_fall == pytest.approx(0, abs=1e-9)
    assert progress.first_batch == 4


def test_batches_that_would_exceed_the_memory_limit_are_left_out() -> None:
    """A choice that runs out of memory and is halved by the trainer, step after step."""
    progress = after(step(1, peak=200, limit=1000), step(2, peak=300, limit=1000))
    assert progress.fitting(range(1, 17)) == list(range(1, 10))
    assert after(step(2, peak=300, limit=1000)).fitting(range(1, 17)) == list(range(1, 7)), "one point: in proportion"
    assert after(step(4, peak=2000, limit=1000)).fitting([4, 8]) == [4], "at least the smallest"
    assert after(step(1)).fitting([1, 64]) == [1, 64], "where nobody measures"


def test_a_trainer_that_keeps_to_less_than_it_was_asked_has_found_its_limit() -> None:
    """The same batch asked for again after every round, each time out of memory."""
    progress = after(step(2))
    progress.ask(8)
    progress.observe(step(2))
    assert progress.fitting([2, 4, 8]) == [2, 4, 8], "a report may have been on its way"
    for _ in range(3):
        progress.observe(step(4))
    assert progress.fitting([2, 4, 8]) == [2, 4]
