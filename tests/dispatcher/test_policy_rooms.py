"""The standing heap of rooms against looking at every replica anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from collm_dispatcher.policy.rooms import Rooms

sizes = st.tuples(st.integers(1, 5), st.integers(0, 6))
steps = st.lists(st.tuples(st.sampled_from(["take", "freed", "set", "remove"]), st.integers(0, 4), sizes), max_size=60)


@given(start=st.lists(sizes, min_size=5, max_size=5), moves=steps)
def test_it_always_takes_the_smallest_share(
    start: list[tuple[int, int]], moves: list[tuple[str, int, tuple[int, int]]]
) -> None:
    """An outdated row of the heap that still counts: a replica filled above its b, or one that is left out for ever."""
    pool, here = Rooms(), dict(enumerate(map(list, start)))
    for rank, (b, in_flight) in here.items():
        pool.set(str(rank), rank, b, in_flight)
    for verb, rank, (b, in_flight) in moves:
        if verb == "take":
            open_ = {n: (row[1] / row[0], n) for n, row in here.items() if row[1] < row[0]}
            expected = min(open_, key=open_.__getitem__) if open_ else None
            assert pool.take() == (None if expected is None else str(expected))
            if expected is not None:
                here[expected][1] += 1
        elif verb == "set":
            here[rank] = [b, in_flight]
            pool.set(str(rank), rank, b, in_flight)
        elif verb == "remove":
            here.pop(rank, None)
            pool.remove(str(rank))
        elif here.get(rank, [0, 0])[1] > 0:
            here[rank][1] -= 1
            pool.freed(str(rank))
        assert pool.free == sum(max(0, row[0] - row[1]) for row in here.values())
