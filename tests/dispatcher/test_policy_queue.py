"""The deadline queue by its properties."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collm_common.types import Slo
from collm_dispatcher.policy.queue import MAX_FLOWS, DeadlineQueue, Waiting

deadlines = st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=30)


def waiting(number: int, deadline_s: float, rejects: bool = False, arrival_s: float = 0.0) -> Waiting:
    slo = Slo("s", late="reject" if rejects else "serve")
    return Waiting("stream", f"{number}-0", f"q{number}", "i1", 0, arrival_s, deadline_s, slo)


def filled(rows: list[tuple[int, bool]]) -> tuple[DeadlineQueue, list[Waiting]]:
    queue, items = DeadlineQueue(), [waiting(n, deadline, rejects) for n, (deadline, rejects) in enumerate(rows)]
    for item in items:
        queue.add(item)
    return queue, items


@given(rows=deadlines, now=st.integers(0, 20))
def test_every_request_is_either_shed_or_offered(rows: list[tuple[int, bool]], now: int) -> None:
    """A request that is in neither place is lost, and its client waits for ever."""
    queue, items = filled(rows)
    out = queue.shed(now)
    offered = queue.first(len(items))
    assert sorted(i.entry_id for i in out + offered) == sorted(i.entry_id for i in items)
    assert {i.entry_id for i in out} == {i.entry_id for i in items if i.deadline_s <= now and i.slo.late == "reject"}


@given(rows=deadlines, now=st.integers(0, 20), count=st.integers(0, 40))
def test_those_in_time_come_by_deadline_and_the_late_ones_after_them(
    rows: list[tuple[int, bool]], now: int, count: int
) -> None:
    """A late request that takes the place of one which could still be in time."""
    queue, _ = filled(rows)
    queue.shed(now)
    order = queue.first(len(rows))
    assert queue.first(count) == order[:count]
    late = [item.deadline_s <= now for item in order]
    assert late == sorted(late)
    in_time = [item.deadline_s for item in order if item.deadline_s > now]
    assert in_time == sorted(in_time)


@given(rows=deadlines, now=st.integers(0, 20), data=st.data())
def test_what_is_removed_does_not_come_back(rows: list[tuple[int, bool]], now: int, data: st.DataObject) -> None:
    """A request that is released twice because it is still in one of the lists."""
    queue, items = filled(rows)
    shed_before = data.draw(st.booleans())
    gone = data.draw(st.sets(st.sampled_from(range(len(items))))) if items else set()
    out = queue.shed(now) if shed_before else []
    for number in gone:
        queue.remove(items[number])
    out += queue.shed(now)
    left = queue.first(len(items))
    assert len(left) == len(queue)
    assert not {items[number].entry_id for number in gone} & {item.entry_id for item in left}
    assert len({item.entry_id for item in out + left}) == len(out) + len(left)
    assert list(queue) == [item for item in items if item in left]


def test_who_can_only_be_late_goes_out_before_the_deadline_and_only_if_it_wants_to() -> None:
    """A place in a batch for an answer that nobody will wait for."""
    queue = DeadlineQueue()
    items = [
        msgspec.structs.replace(waiting(n, 10.0, rejects), latest_s=6.0) for n, rejects in enumerate((True, False))
    ]
    unknown = waiting(2, 10.0, rejects=True)
    for item in (*items, unknown):
        queue.add(item)
    assert queue.shed(5.9) == []
    assert queue.shed(6.0) == [items[0]]
    assert queue.first(9) == [items[1], unknown]


def test_where_late_answers_are_refused_the_short_prompts_go_first() -> None:
    """Under overload, one long prompt that is in time at the price of three short ones that are not."""

    def names(late: Literal["serve", "reject"]) -> list[str]:
        queue = DeadlineQueue()
        for number, (deadline_s, prompt) in enumerate(((1.0, 4000), (2.0, 100), (3.0, 120), (4.0, 90))):
            item = waiting(number, deadline_s, rejects=late == "reject")
            queue.add(msgspec.structs.replace(item, prompt_tokens=prompt))
        return [item.request_id for item in queue.first(4)]

    assert names("reject") == ["q1", "q2", "q3", "q0"]
    assert names("serve") == ["q0", "q1", "q2", "q3"]


def test_an_entry_that_comes_twice_is_one() -> None:
    """A claimed entry that was also read is served twice."""
    queue, item = DeadlineQueue(), waiting(1, 5.0)
    queue.add(item)
    queue.add(item)
    assert ("stream", "1-0") in queue
    assert queue.first(9) == [item]


@pytest.mark.parametrize("reverse", [False, True])
def test_equal_deadlines_go_by_arrival(reverse: bool) -> None:
    """Requests without a deadline that starve behind later ones."""
    queue = DeadlineQueue()
    items = [waiting(n, float("inf"), arrival_s=n) for n in range(5)]
    for item in reversed(items) if reverse else items:
        queue.add(item)
    assert queue.first(5) == items


# --- fairness


def of(flow: str, number: int, deadline_s: float) -> Waiting:
    """A request of `stream/tenant`."""
    stream, tenant = flow.split("/")
    return Waiting(stream, f"{flow}-{number}", f"{flow}{number}", "i1", 0, 0.0, deadline_s, Slo("s"), tenant=tenant)


def flooded(counts: dict[str, int], lead: int) -> DeadlineQueue:
    """Flows whose names come earlier have the earlier deadlines."""
    queue = DeadlineQueue(lead)
    for rank, (flow, count) in enumerate(counts.items()):
        for number in range(count):
            queue.add(of(flow, number, 1000.0 * rank + number + 1))
    return queue


@given(
    counts=st.dictionaries(st.sampled_from(["x/a", "x/b", "y/a", "y/c"]), st.integers(1, 60), min_size=2),
    lead=st.integers(0, 8),
)
def test_while_two_wait_neither_gets_far_ahead(counts: dict[str, int], lead: int) -> None:
    """A tenant, or a strict class, whose flood of early deadlines keeps everybody else waiting for ever."""
    queue = flooded(counts, lead)
    served = dict.fromkeys(counts, 0)
    while (item := queue.pick()) is not None:
        served[f"{item.key}/{item.tenant}"] += 1
        queue.remove(item)
        waiting_still = [served[flow] for flow in counts if served[flow] < counts[flow]]
        if len(waiting_still) == len(counts):
            assert max(waiting_still) - min(waiting_still) <= lead + 1
    assert served == counts


@given(deadlines=st.lists(st.integers(1, 99), max_size=16))
def test_within_the_lead_the_deadline_alone_decides(deadlines: list[int]) -> None:
    """Fairness that costs deadlines although there is room for all."""
    queue = DeadlineQueue(lead=16)
    for number, deadline_s in enumerate(deadlines):
        queue.add(of("x/a" if number % 3 else "x/b", number, deadline_s))
    assert [item.deadline_s for item in queue.first(99)] == sorted(deadlines)


def test_who_was_away_has_no_claim_to_the_turns_it_did_not_use() -> None:
    """A tenant that comes back after a quiet hour and takes the cell for itself until it has caught up."""
    queue = flooded({"x/busy": 50, "x/away": 0}, lead=2)
    for _ in range(40):
        item = queue.pick()
        assert item is not None
        queue.remove(item)
    for number in range(20):
        queue.add(of("x/away", number, 1.0))
    turns = [item.tenant for item in queue.first(10)]
    assert 3 <= turns.count("busy") <= 6


def test_many_tenants_share_what_is_kept_of_them() -> None:
    """A client that invents tenants until the dispatcher's memory is full."""
    queue = DeadlineQueue()
    for number in range(3 * MAX_FLOWS):
        queue.add(of(f"x/t{number}", number, number + 1.0))
    assert len(queue._flows) <= MAX_FLOWS + 1
    picked = queue.first(999)
    assert len(picked) == 3 * MAX_FLOWS
    for item in picked:
        queue.remove(item)
    queue.add(of("x/new", 1, 1.0))
    assert len(queue._flows) == 1


@given(rows=deadlines, now=st.integers(0, 20), data=st.data())
def test_what_is_picked_and_put_back_is_where_it_was(
    rows: list[tuple[int, bool]], now: int, data: st.DataObject
) -> None:
    """A release that failed and that changed the order of all others, or was forgotten when its time ran out."""
    queue, items = filled(rows)
    before = queue.first(99)
    picked = [item for item in (queue.pick() for _ in range(data.draw(st.integers(0, 5)))) if item is not None]
    assert queue.waiting == len(items) - len(picked)
    early = queue.shed(now) if data.draw(st.booleans()) else []
    assert not {item.entry_id for item in early} & {item.entry_id for item in picked}
    for item in reversed(picked):
        queue.restore(item)
    late = queue.shed(now)
    expected = {item.entry_id for item in items if item.refused_s <= now}
    assert {item.entry_id for item in early + late} == expected
    in_time = [item for item in before if item.deadline_s > now]
    assert [item for item in queue.first(99) if item.deadline_s > now] == in_time
