"""The idle policy over slices of real and of on/off traffic: it uses lulls, and it does not flap."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collm_common.messages import InferenceReport
from collm_common.types import ReplicaInfo, ReplicaState
from collm_launcher.loads import Loads
from collm_launcher.policy.idle import IdleRules, Move
from collm_tools.load.traces import read_trace

REPOSITORY = Path(__file__).resolve().parents[2]
TRACES = Path(os.environ.get("COLLM_TEST_TRACES", REPOSITORY.parent / "shared" / "data" / "azure-llm-2023"))
RULES = IdleRules(window=6, return_ticks=4)
IDS = ("r1", "r2", "r3")
BATCH, TOKEN_S, SLICE_S, JOB_TICKS = 8, 0.02, 240, 20
SERVING, IDLE, COMBINED = ReplicaState.SERVING, ReplicaState.IDLE, ReplicaState.COMBINED
Requests = Sequence[tuple[float, float]]
"""(arrival, seconds in the batch)."""


class Cell:
    """Three replicas that share their requests evenly, a tick a second; a job starts if `trains` and all are idle.

    `waited` counts the ticks that a replica ends in Idle.
    """

    def __init__(self, requests: Requests, trains: bool) -> None:
        self.requests, self.trains = requests, trains
        self.loads = Loads(RULES, 0.5)
        self.states = dict.fromkeys(IDS, SERVING)
        self.running: dict[str, list[float]] = {id_: [] for id_ in IDS}
        self.moves: list[tuple[int, Move]] = []
        self.jobs = self.waited = self.unserved = 0
        self.job_ticks = 0

    def run(self, ticks: int) -> None:
        by_tick: dict[int, list[float]] = {}
        for at_s, length_s in self.requests:
            by_tick.setdefault(int(at_s), []).append(length_s)
        for tick in range(ticks):
            for length_s in by_tick.get(tick, []):
                self._serve(tick, length_s)
            self._tick(tick)

    def _serve(self, tick: int, length_s: float) -> None:
        takers = [id_ for id_ in IDS if self.states[id_] is not IDLE]
        if not takers:
            self.unserved += 1
            return
        taker = min(takers, key=lambda id_: len(self.running[id_]))
        self.running[taker].append(tick + length_s)

    def _tick(self, tick: int) -> None:
        infos = {id_: self._info(id_) for id_ in IDS}
        for id_ in IDS:
            self.running[id_] = [end for end in self.running[id_] if end > tick]
            self.loads.hear(self._report(id_))
        self.loads.tick(infos, {})
        for move in self.loads.moves("m", infos, 3):
            self._move(tick, move)
        self._train()
        self.waited += sum(state is IDLE for state in self.states.values())

    def _train(self) -> None:
        if self.job_ticks:
            self.job_ticks -= 1
            if not self.job_ticks:
                self.states = dict.fromkeys(IDS, SERVING)
        elif self.trains and all(state is IDLE for state in self.states.values()):
            self.states, self.job_ticks = dict.fromkeys(IDS, COMBINED), JOB_TICKS
            self.jobs += 1

    def _move(self, tick: int, move: Move) -> None:
        assert self.states[move.replica] is move.before
        self.states[move.replica] = move.after
        self.loads.moved(move)
        self.moves.append((tick, move))

    def _info(self, id_: str) -> ReplicaInfo:
        return ReplicaInfo(id_, "m", "i", self.states[id_], ready=True, infer_batch_max=BATCH, context_tokens=64)

    def _report(self, id_: str) -> InferenceReport:
        running = min(BATCH, len(self.running[id_]))
        return InferenceReport(
            replica=id_,
            state=self.states[id_],
            time_s=0.0,
            utilisation=running / BATCH,
            memory_bytes=0,
            queue=0,
            running=running,
            mean_batch=running,
            limit=BATCH,
            train_batch=0,
            finished=running,
        )


def assert_calm(cell: Cell) -> None:
    """Every stay is long enough, and stays that come to nothing become rarer."""
    for id_ in IDS:
        own = [(tick, move) for tick, move in cell.moves if move.replica == id_]
        for (before, left), (after, entered) in pairwise(own):
            least = RULES.return_ticks // 2 if left.after is IDLE else RULES.window // 2
            assert after - before >= least, f"{left.reason}, then {entered.reason}"
        falls = [tick for tick, move in own if move.after is IDLE]
        pauses = [later - earlier for earlier, later in pairwise(falls)]
        for number, pause in enumerate(pauses):
            assert pause >= RULES.return_ticks * 2 ** min(number, 5), "as if it had learnt nothing"


def sliced(arrivals: Requests, start_s: float) -> Requests:
    return [(at_s - start_s, length_s) for at_s, length_s in arrivals if start_s <= at_s < start_s + SLICE_S]


@pytest.fixture(scope="module", params=["conv", "code"])
def trace(request: pytest.FixtureRequest) -> Requests:
    (path,) = TRACES.glob(f"*{request.param}*.csv") if TRACES.is_dir() else [None]
    if path is None:
        pytest.skip(f"no recorded traces at {TRACES}: COLLM_TEST_TRACES names their folder")
    return [(arrival.at_s, (arrival.output_tokens or 1) * TOKEN_S) for arrival in read_trace(path)]


@settings(max_examples=12, deadline=None)
@given(start_s=st.integers(0, 3600 - SLICE_S))
def test_recorded_traffic_makes_no_replica_flap(trace: Requests, start_s: int) -> None:
    """Replicas that go back and forth with every burst, or again and again for a job that never comes."""
    cell = Cell(sliced(trace, start_s), trains=False)
    cell.run(SLICE_S)
    assert_calm(cell)


@settings(max_examples=12, deadline=None)
@given(start_s=st.integers(0, 3600 - SLICE_S), thin=st.integers(1, 8))
def test_under_recorded_traffic_nobody_waits_in_idle_for_a_job(trace: Requests, start_s: int, thin: int) -> None:
    """Two replicas without requests, which the third has instead of them, so that it never joins them."""
    cell = Cell(sliced(trace, start_s)[::thin], trains=True)
    cell.run(SLICE_S)
    assert cell.waited == 0
    assert len([move for _, move in cell.moves if move.after is IDLE]) == 3 * cell.jobs


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), on_s=st.integers(5, 60), off_s=st.integers(5, 60), rate=st.floats(0.5, 10))
def test_bursts_and_lulls_make_no_replica_flap(seed: int, on_s: int, off_s: int, rate: float) -> None:
    """The same for traffic whose period is that of the windows."""
    drawn = random.Random(seed)
    requests, now = [], 0.0
    while now < SLICE_S:
        now += drawn.expovariate(rate)
        if now % (on_s + off_s) < on_s:
            requests.append((now, drawn.uniform(0.5, 4)))
    cell = Cell(requests, trains=False)
    cell.run(SLICE_S)
    assert_calm(cell)


def test_a_lull_is_used_and_nothing_is_left_unserved_in_it() -> None:
    """Calm that comes from never falling idle, or a job that takes every replica from its requests."""
    quiet = [(float(at), 1.0) for at in range(0, 60, 20)]
    cell = Cell(quiet, trains=True)
    cell.run(15)
    assert (cell.jobs, set(cell.states.values())) == (1, {COMBINED})
    assert cell.unserved == 0
    assert {move.after for _, move in cell.moves} == {IDLE}
