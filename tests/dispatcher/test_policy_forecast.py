"""The arrival forecast by its properties."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from collm_dispatcher.policy.forecast import Forecast

windows = st.lists(st.tuples(st.integers(0, 100), st.floats(0.01, 5)), min_size=1, max_size=50)


def seen(*observations: tuple[int, float]) -> Forecast:
    forecast = Forecast()
    for arrivals, elapsed_s in observations:
        forecast.observe(arrivals, elapsed_s)
    return forecast


@given(windows)
def test_the_forecast_stays_between_nothing_and_the_highest_rate_seen(observations: list[tuple[int, float]]) -> None:
    """A step longer than the time constant that overshoots or turns negative."""
    most = max(arrivals / elapsed_s for arrivals, elapsed_s in observations)
    assert 0 <= seen(*observations).rate <= most * (1 + 1e-9)


def test_a_steady_rate_is_found_however_often_one_looks() -> None:
    """A forecast that depends on the length of the window."""
    for elapsed_s, count in ((0.5, 400), (2.0, 100)):
        assert math.isclose(seen(*[(round(8 * elapsed_s), elapsed_s)] * count).rate, 8, rel_tol=1e-3)


def test_a_burst_counts_at_once_and_is_forgotten_slowly() -> None:
    """Replicas that are promoted long after the burst began, or sent away in the first gap of it."""
    quiet = [(1, 1.0)] * 60
    burst = seen(*quiet, *[(50, 1.0)] * 2)
    assert burst.rate > 25
    gap = seen(*quiet, *[(50, 1.0)] * 20, *[(0, 1.0)] * 5)
    assert gap.rate > 20
    assert seen(*quiet, *[(50, 1.0)] * 20, *[(0, 1.0)] * 120).rate < 1


def test_no_time_means_no_news() -> None:
    """A division by zero, or an infinite rate, when two looks coincide."""
    assert seen((3, 1.0), (100, 0.0)) == seen((3, 1.0))
