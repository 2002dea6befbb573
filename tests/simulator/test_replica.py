"""The simulated replica against the step-by-step engine it stands for."""

from __future__ import annotations

from importlib.resources import files
from math import ceil, inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collm_common.types import Slo
from collm_tools.simulator.hardware import GRID, MIXED_S, Hardware, Sharing, linear, measured
from collm_tools.simulator.replica import Replica
from collm_tools.simulator.request import SimRequest

HARDWARE = linear(0.01, 0.001, per_train_s=0.004, prefill_s_per_token=1e-4, micro_step_s=0.05, step_tokens=100)
SLO = Slo("s")


def request(number: int, arrival_s: float, prompt: int, output: int, wanted_s: float = inf) -> SimRequest:
    return SimRequest(number, arrival_s, inf, prompt, output, SLO, wanted_s=wanted_s)


def run(replica: Replica, requests: list[SimRequest]) -> list[SimRequest]:
    """Offer them as they come, and let the replica go on to the end."""
    ended: list[SimRequest] = []
    coming = sorted(requests, key=lambda item: item.arrival_s)
    while coming or replica.next_s < inf:
        if coming and coming[0].arrival_s <= replica.next_s:
            item = coming.pop(0)
            item.released_s = item.arrival_s
            replica.add(item.arrival_s, item)
        else:
            replica.step(replica.next_s)
        ended += replica.take_ended()
    return ended


def step_by_step(hardware: Hardware, b: int, requests: list[SimRequest]) -> dict[int, tuple[float, float]]:
    """(first token, last token) of each: the engine's loop, an iteration at a time, prompts first come first served.

    One burst of prompts at a time, each iteration of it a token for all that run.
    """
    now, burst, pieces, cost = 0.0, list[SimRequest](), 0, 0.0
    waiting, running = sorted(requests, key=lambda item: item.arrival_s), dict[int, int]()
    times: dict[int, tuple[float, float]] = {}
    while waiting or running or burst:
        if not burst:
            tokens = 0
            while waiting and waiting[0].arrival_s <= now + 1e-9 and len(running) + len(burst) < b:
                if burst and tokens + waiting[0].prompt_tokens > hardware.step_tokens:
                    break
                tokens += waiting[0].prompt_tokens
                burst.append(waiting.pop(0))
            pieces = ceil(tokens / hardware.step_tokens)
            cost = hardware.prefill[0] * tokens / pieces if burst else 0.0
        if not burst and not running:
            now = waiting[0].arrival_s
            continue
        now += hardware.decode[0][len(running) + len(burst)] + (cost if burst else 0.0)
        by_number = {item.number: item for item in requests}
        for number in list(running):
            running[number] -= 1
            if running[number] == 0:
                del running[number]
                times[number] = (times[number][0], now)
        pieces -= 1
        if burst and pieces == 0:
            for item in burst:
                times[item.number] = (now, now)
                if item.output_tokens > 1:
                    running[item.number] = by_number[item.number].output_tokens - 1
            burst = []
    return times


def test_one_request_takes_its_prefill_and_its_steps() -> None:
    """A token counted twice, or the first one for nothing: 50 tokens at 0.1 ms, then nine steps of 11 ms."""
    (done,) = run(Replica("r", HARDWARE, 4), [request(0, 1.0, 50, 10)])
    assert done.first_s == pytest.approx(1.0 + 0.011 + 0.005)
    assert done.end_s == pytest.approx(done.first_s + 9 * 0.011)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 100), st.integers(1, 30)), min_size=1, max_size=12),
    b=st.integers(1, 6),
)
def test_jumping_ends_where_stepping_ends(rows: list[tuple[int, int]], b: int) -> None:
    """A pace that is wrong by a batch size or a burst: all come at once, so that no arrival falls inside a step."""
    requests = [request(number, 0.0, prompt, output) for number, (prompt, output) in enumerate(rows)]
    expected = step_by_step(HARDWARE, b, requests)
    replica = Replica("r", HARDWARE, b)
    for item in requests:
        item.released_s = 0.0
    replica.b = 0
    for item in requests:
        replica.add(0.0, item)
    replica.configure(0.0, b, 0)
    for item in run(replica, []):
        first_s, end_s = expected[item.number]
        assert item.first_s == pytest.approx(first_s, abs=1e-6)
        assert item.end_s == pytest.approx(end_s, abs=1e-6)


def test_a_smaller_batch_limit_stops_admission_and_throws_nobody_out() -> None:
    """A recall that cuts answers off."""
    replica = Replica("r", HARDWARE, 4)
    for number in range(4):
        replica.add(0.0, request(number, 0.0, 1, 50))
    replica.step(replica.next_s)
    replica.configure(replica.next_s, 2, 0)
    assert replica.running == 4
    assert len(run(replica, [])) == 4


def test_training_makes_decoding_slower_and_counts_its_micro_steps() -> None:
    """Interference that touches one of the two only."""
    alone, beside = Replica("a", HARDWARE, 4), Replica("b", HARDWARE, 4)
    beside.configure(0.0, 4, 8)
    (first,), (second,) = run(alone, [request(0, 0.0, 1, 100)]), run(beside, [request(0, 0.0, 1, 100)])
    assert second.end_s > 3 * first.end_s
    assert beside.micro_steps == pytest.approx(beside.train_s / 0.4, rel=0.02)
    assert alone.micro_steps == 0


def test_nobody_is_served_who_does_not_wait_any_more() -> None:
    """A full replica that spends itself on answers that can only be late."""
    replica = Replica("r", HARDWARE, 1)
    ended = run(replica, [request(0, 0.0, 1, 100), request(1, 0.0, 1, 5, wanted_s=0.5)])
    assert [(item.number, item.outcome) for item in ended] == [(0, "completed"), (1, "refused")]


def test_what_was_taken_back_does_not_run() -> None:
    """A migrated request that two replicas answer."""
    replica = Replica("r", HARDWARE, 1)
    items = [request(number, 0.0, 1, 10) for number in range(3)]
    for item in items:
        replica.add(0.0, item)
    assert replica.withdraw(items[1])
    assert not replica.withdraw(items[0])
    assert [item.number for item in replica.waiting] == [2]
    assert [item.number for item in run(replica, [])] == [0, 2]


def test_telemetry_tells_the_step_times_that_were_simulated() -> None:
    """A report from which the coordinator would fit another replica than the one that runs."""
    replica = Replica("r", HARDWARE, 4)
    for number in range(3):
        replica.add(0.0, request(number, 0.0, 10, 200))
    while replica.next_s < inf:
        replica.step(replica.next_s)
    report = replica.report(5.0)
    assert {row.sizes.infer for row in report.iterations} == {2, 3}
    assert all(row.mean_s == pytest.approx(HARDWARE.decode[0][row.sizes.infer]) for row in report.iterations)
    assert report.finished == 3
    assert report.output_tokens == 600
    assert 0 < report.utilisation < 1


@pytest.mark.parametrize("sharing", ["30", "60", "100", "timeslice"])
def test_the_measured_replica_slows_down_with_both_batches(sharing: Sharing) -> None:
    """A table read along the wrong axis, or one section's time alone beside another's time together."""
    hardware = measured(sharing)
    corners = [hardware.decode[train][b] for train, b in ((0, 1), (0, 64), (16, 1), (16, 64))]
    assert corners[0] == pytest.approx(0.00497, abs=2e-5)
    assert corners[0] < corners[1] < corners[3]
    assert corners[0] < corners[2] < corners[3]
    assert list(hardware.micro_step[1:]) == sorted(hardware.micro_step[1:])
    assert hardware.prefill[0] < hardware.prefill[4] < hardware.prefill[16]
    assert hardware.decode[0] == measured("30").decode[0]


def test_a_point_of_the_grid_is_what_was_measured() -> None:
    """A replica whose step, activity or training is another than the engine's beside the same trainer."""
    hardware = measured("60")
    assert hardware.decode[16][64] == pytest.approx(0.0081532)
    assert hardware.activity[16][64] == pytest.approx(0.8873)
    assert hardware.prefill[0] * 2048 + hardware.decode[0][1] == pytest.approx(0.0533, rel=0.01)
    assert hardware.micro_step[16] == pytest.approx(0.745, rel=0.02)


def test_the_replica_is_modelled_from_the_newest_grid() -> None:
    """A bench that is run again and a simulator that goes on with the old figures."""
    installed = files("collm_tools.simulator") / "data" / GRID
    assert installed.read_text() == (Path(__file__).parents[2] / "bench" / "results" / GRID).read_text()


def test_longer_contexts_make_longer_steps() -> None:
    """2,000 tokens each at 64 sequences: 9.16 ms, not the 6.02 ms of 320."""
    assert measured(context_tokens=2000).decode[0][64] == pytest.approx(0.00916, rel=0.01)
    assert measured(context_tokens=2000).decode[0][1] == pytest.approx(measured().decode[0][1], rel=0.02)


def test_activity_is_what_was_measured() -> None:
    """A utilisation that calls one sequence as much work as 64, or a trainer alone that is busier than both."""
    hardware = measured("30")
    assert hardware.activity[0][0] == pytest.approx(0.03)
    assert hardware.activity[0][1] == pytest.approx(0.66, abs=0.02)
    assert hardware.activity[0][64] == pytest.approx(0.77, abs=0.01)
    assert hardware.activity[16][64] == pytest.approx(0.8154)
    assert hardware.activity[16][0] < hardware.activity[16][1]


def test_a_step_with_a_short_prompt_takes_what_launching_it_takes() -> None:
    """Prompts of ten tokens that cost as little as their matrix products."""
    (done,) = run(Replica("r", measured(), 4), [request(0, 0.0, 10, 1)])
    assert done.first_s == pytest.approx(MIXED_S)


def test_a_static_batch_begins_and_ends_as_a_whole() -> None:
    """Continuous batching where the paper's hardware had none."""
    replica = Replica("r", HARDWARE, 4, static=True)
    replica.b = 0
    for number, output in enumerate((5, 20)):
        replica.add(0.0, request(number, 0.0, 1, output))
    replica.configure(0.0, 4, 0)
    replica.add(0.0, request(2, 0.0, 1, 5))
    first, second, third = run(replica, [])
    assert first.end_s == second.end_s == third.started_s
