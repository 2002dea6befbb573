"""Who carries the load that is left: enough together, and where it costs the least training."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from collm_common.types import BatchSizes
from collm_coordinator.solver import Choice
from collm_coordinator.split import split


def option(goodput: float, rate: float) -> Choice:
    return Choice(BatchSizes(1, 1), goodput, True, rate)


def test_without_need_everybody_trains_at_its_best() -> None:
    """Training that is held back for a load that is not there."""
    assert split({"a": [option(5, 1), option(1, 9)], "b": [option(2, 3)]}, 0.0) == {"a": 1, "b": 3}


def test_the_replica_that_learns_least_carries_first() -> None:
    """A replica whose loss falls fast, slowed down for one that learns nothing any more."""
    fast, done = [option(10, 1), option(4, 5)], [option(0.1, 1), option(0.01, 5)]
    assert split({"fast": fast, "done": done}, 6.0) == {"fast": 1, "done": 5}
    assert split({"fast": fast, "done": done}, 10.0) == {"fast": 5, "done": 5}


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from("abc"),
        st.lists(st.builds(option, st.floats(0, 10), st.floats(0, 10)), max_size=5),
        max_size=3,
    ),
    st.floats(0, 40),
)
def test_the_load_is_carried_wherever_that_is_possible(options: dict[str, list[Choice]], needed: float) -> None:
    """A search that stops short, or never."""
    carried = sum(split(options, needed).values())
    most = sum(max(choice.rate for choice in own) for own in options.values() if own)
    assert carried >= min(needed, most) - 1e-9
