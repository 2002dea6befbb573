"""The objective that binds a replica, and how much of it a queue may take."""

from __future__ import annotations

import pytest

from collm_common.messages import Served
from collm_common.types import Slo
from collm_coordinator.objectives import Objectives, queue_that_counts

BASE = Slo("base", e2e_s=20.0)
CHAT, CODE = Slo("chat", ttft_s=0.5, tpot_s=0.05), Slo("code", tpot_s=0.1, e2e_s=8.0)


def seen(*served: Served) -> Objectives:
    found = Objectives()
    found.observe(1.0, served)
    return found


def test_every_limit_is_the_tightest_of_the_classes_that_are_served() -> None:
    """Batches chosen for one class that break another one on the same replica."""
    binding = seen(Served(CHAT, 10), Served(CODE, 10)).binding(BASE, lambda slo: True)
    assert (binding.ttft_s, binding.tpot_s, binding.e2e_s) == (0.5, 0.05, 8.0)


def test_without_requests_the_configured_one_is_kept() -> None:
    """No objective at all before the first request, or after the last."""
    assert Objectives().binding(BASE, lambda slo: True) == BASE


def test_a_class_that_nothing_could_keep_or_that_hardly_comes_does_not_bind() -> None:
    """One client that asks for a millisecond stops the training of all replicas."""
    objectives = seen(Served(CHAT, 1), Served(CODE, 99))
    assert objectives.binding(BASE, lambda slo: True).ttft_s is None
    assert objectives.binding(BASE, lambda slo: slo is not CODE) == BASE


def test_a_class_that_comes_no_more_is_forgotten() -> None:
    """A class of last week that binds for ever, and memory that grows with every objective."""
    objectives = seen(Served(CHAT, 10))
    for minute in range(1, 60):
        objectives.observe(1.0 + 60 * minute, [Served(CODE, 10)])
    assert objectives.binding(BASE, lambda slo: True).ttft_s is None
    assert list(objectives.counts) == [CODE]


@pytest.mark.parametrize(("queue_s", "counts"), [(0.1, 0.1), (100.0, 0.25)])
def test_a_queue_takes_at_most_half_of_the_objective(queue_s: float, counts: float) -> None:
    """Overload that makes batches smaller, which makes the overload worse."""
    assert queue_that_counts(Slo("s", ttft_s=0.5, e2e_s=9.0), queue_s) == counts
