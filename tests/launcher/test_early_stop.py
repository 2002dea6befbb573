"""When a client leaves because its loss falls no further."""

from __future__ import annotations

import pytest

from collm_launcher.policy.early_stop import should_stop


@pytest.mark.parametrize(
    ("losses", "stops"),
    [
        ([], False),
        ([2.0, 2.0], False),
        ([2.0, 2.0, 2.0], True),
        ([2.0, 1.5, 1.2], False),
        ([2.0, 1.999, 1.998], True),
        ([2.0, 2.5, 1.5], False),
        ([2.0, 1.0, 1.5, 1.2], True),
    ],
)
def test_it_stops_after_two_rounds_without_a_real_fall(losses: list[float], stops: bool) -> None:
    """One bad round that ends a client's part, or noise that keeps it in for ever."""
    assert should_stop(losses, patience=2, min_fall=0.01) is stops


def test_no_patience_means_never() -> None:
    """A setting that was meant to switch early stop off."""
    assert not should_stop([1.0] * 50, patience=0, min_fall=0.01)
