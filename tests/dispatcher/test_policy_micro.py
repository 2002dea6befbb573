"""The micro-cycle by its properties: who gets which request, and that nothing ever stands still."""

from __future__ import annotations

import math
import random

import msgspec
from hypothesis import assume, given
from hypothesis import strategies as st

from collm_common.types import Slo
from collm_dispatcher.policy.micro import Lane, MicroCycle, Release
from collm_dispatcher.policy.pacing import Mode
from collm_dispatcher.policy.queue import Waiting

SLO = Slo("s")


def waiting(number: int, deadline_s: float = math.inf, stream: str = "s", arrival_s: float = 0.0) -> Waiting:
    return Waiting(stream, f"{number}-0", f"q{number}", "i1", 0, arrival_s, deadline_s, SLO)


def cycle(rooms: list[tuple[int, int]], count: int) -> MicroCycle:
    """Replicas r0, r1, .. with (b, in flight), and `count` requests that wait."""
    micro = MicroCycle()
    lanes = [Lane(f"r{n}", Mode(b)) for n, (b, _) in enumerate(rooms)]
    micro.follow(lanes, {"s": [lane.id for lane in lanes]})
    for n, (_, in_flight) in enumerate(rooms):
        micro.count(f"r{n}", in_flight)
    for n in range(count):
        micro.queue.add(waiting(n))
    return micro


offered = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), max_size=6)


@given(rooms=offered, count=st.integers(0, 40), most=st.integers(0, 50))
def test_rooms_are_filled_and_nothing_more(rooms: list[tuple[int, int]], count: int, most: int) -> None:
    """More than b in flight at a replica, or room that is left while requests wait."""
    released, _ = cycle(rooms, count).decide(0.0, most)
    free = {f"r{n}": max(0, b - in_flight) for n, (b, in_flight) in enumerate(rooms)}
    assert len(released) == min(count, most, sum(free.values()))
    assert all(sum(r.replica == id_ for r in released) <= room for id_, room in free.items())
    assert len({release.item.entry_id for release in released}) == len(released)


@given(rooms=offered, count=st.integers(1, 40))
def test_the_replica_with_the_smallest_share_gets_the_next(rooms: list[tuple[int, int]], count: int) -> None:
    """One replica that is filled while another one stands empty."""
    released, _ = cycle(rooms, count).decide(0.0, count)
    assume(released)
    in_flight = {f"r{n}": here for n, (_, here) in enumerate(rooms)}
    sizes = {f"r{n}": b for n, (b, _) in enumerate(rooms)}
    for release in released:
        shares = {id_: in_flight[id_] / b for id_, b in sizes.items() if in_flight[id_] < b}
        assert shares[release.replica] == min(shares.values())
        assert release.ahead == in_flight[release.replica]
        in_flight[release.replica] += 1


def test_a_better_replica_runs_the_larger_batch() -> None:
    """Quality that is measured and has no say."""
    micro = MicroCycle()
    micro.follow([Lane("worse", Mode(12), 1.0), Lane("best", Mode(12), 2.0)], {"s": ["worse", "best"]})
    for n in range(12):
        micro.queue.add(waiting(n))
    released, _ = micro.decide(0.0, 12)
    assert sum(release.replica == "best" for release in released) == 8


def test_a_stream_goes_only_where_it_is_routed() -> None:
    """Requests of a strict class on a replica that runs the large batch of another one."""
    micro = MicroCycle()
    micro.follow([Lane("a", Mode(2)), Lane("b", Mode(8))], {"strict": ["a"], "loose": ["b"]})
    for n in range(5):
        micro.queue.add(waiting(n, 1.0, "strict"))
        micro.queue.add(waiting(n, 9.0, "loose"))
    released, _ = micro.decide(0.0, 99)
    assert [(r.item.key, r.replica) for r in released].count(("strict", "a")) == 2
    assert [(r.item.key, r.replica) for r in released].count(("loose", "b")) == 5
    assert len(released) == 7


def test_what_could_not_be_moved_waits_again_in_its_old_place() -> None:
    """A refused release that is lost, or that goes to the end of the queue."""
    micro = MicroCycle()
    micro.follow([Lane("a", Mode(1))], {"s": ["a"]})
    first, second = waiting(1, 5.0), waiting(2, 6.0)
    micro.queue.add(second)
    micro.queue.add(first)
    (release,), _ = micro.decide(0.0, 9)
    assert release.item == first
    micro.refuse(release)
    (again,), _ = micro.decide(0.0, 9)
    assert again.item == first


def test_holding_back_ends_with_the_room_filled_or_the_slack_used() -> None:
    """A request that waits for others which never come, or a full batch that waits all the same."""
    micro = MicroCycle()
    micro.follow([Lane("a", Mode(2, 1.0))], {"s": ["a"]})
    micro.queue.add(waiting(1, 100.0, arrival_s=10.0))
    assert micro.decide(10.0, 9, hold_s=0.5) == ([], 10.5)
    assert len(micro.decide(10.5, 9, hold_s=0.5)[0]) == 1
    micro.queue.add(waiting(2, 11.3, arrival_s=11.0))
    assert len(micro.decide(11.0, 9, hold_s=0.5)[0]) == 1


class Cell:
    """Replicas whose answers end at random, driven by the micro-cycle alone."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.micro = MicroCycle()
        self.sizes = {f"r{n}": self.draw.randint(1, 4) for n in range(self.draw.randint(1, 4))}
        self.here: dict[str, list[Release]] = {id_: [] for id_ in self.sizes}
        self.served: list[str] = []
        self.arrived: list[str] = []
        self.plan()

    def plan(self) -> None:
        """Routes and batches change under load; each stream has somebody."""
        lanes = [Lane(id_, Mode(self.draw.randint(1, b))) for id_, b in self.sizes.items()]
        ids = list(self.sizes)
        routes = {stream: self.draw.sample(ids, self.draw.randint(1, len(ids))) for stream in "xy"}
        self.lanes, self.routes = {lane.id: lane for lane in lanes}, routes
        self.micro.follow(lanes, routes)

    def arrive(self) -> None:
        number = len(self.arrived)
        item = waiting(number, self.draw.choice([math.inf, 1.0 * number]), self.draw.choice("xy"))
        self.arrived.append(item.request_id)
        self.micro.queue.add(item)

    def release(self) -> None:
        released, _ = self.micro.decide(0.0, 100)
        for release in released:
            if self.draw.random() < 0.1:
                self.micro.refuse(release)
                continue
            assert len(self.here[release.replica]) < self.lanes[release.replica].mode.b
            assert release.replica in self.routes[release.item.key]
            self.here[release.replica].append(release)
            self.micro.queue.remove(release.item)

    def end(self) -> None:
        busy = [id_ for id_, there in self.here.items() if there]
        if busy:
            id_ = self.draw.choice(busy)
            self.served.append(self.here[id_].pop().item.request_id)
            self.micro.ended(id_)


@given(st.integers(0, 10**6))
def test_nothing_is_lost_or_doubled_and_nothing_stalls_at_saturation(seed: int) -> None:
    """Full replicas, plans that change, releases that fail: a room that is never seen again stops the whole stream."""
    cell = Cell(seed)
    for _ in range(120):
        cell.draw.choice([cell.arrive, cell.arrive, cell.release, cell.end, cell.plan])()
    for _ in range(20 * len(cell.arrived) + 20):
        cell.release()
        cell.end()
    assert sorted(cell.served) == sorted(cell.arrived)


def test_a_replica_that_comes_back_with_a_smaller_batch_is_not_overfilled() -> None:
    """A plan that forgets what is in flight."""
    micro = MicroCycle()
    micro.follow([Lane("a", Mode(4))], {"s": ["a"]})
    for n in range(9):
        micro.queue.add(waiting(n))
    assert len(micro.decide(0.0, 9)[0]) == 4
    micro.follow([], {})
    micro.follow([Lane("a", Mode(3))], {"s": ["a"]})
    assert micro.decide(0.0, 9)[0] == []
    micro.ended("a", 2)
    assert len(micro.decide(0.0, 9)[0]) == 1
    micro.forget("a")
    assert micro.decide(0.0, 9)[0] == []


def test_late_ones_of_one_stream_do_not_hold_up_another() -> None:
    """A late request at the head of a stream without room that keeps all others waiting."""
    micro = MicroCycle()
    micro.follow([Lane("a", Mode(1)), Lane("b", Mode(1))], {"x": ["a"], "y": ["b"]})
    late = msgspec.structs.replace(waiting(1, 1.0, "x"))
    micro.queue.add(late)
    micro.queue.add(waiting(2, 9.0, "y"))
    micro.count("a", 1)
    micro.queue.shed(5.0)
    assert [release.item.request_id for release in micro.decide(5.0, 9)[0]] == ["q2"]
