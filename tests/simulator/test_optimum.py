"""Online against the exact offline optimum."""

from __future__ import annotations

import pytest

from collm_tools.simulator.optimum import solve


@pytest.mark.parametrize("count", [3, 6, 8])
def test_online_is_never_above_the_optimum(count: int) -> None:
    """A simulator that serves by foresight, or counts what is late."""
    found = [solve(count, seed) for seed in range(4)]
    assert all(0 <= one.online <= one.optimum for one in found), found
    assert sum(one.online for one in found) >= 0.5 * sum(one.optimum for one in found)
