"""Who falls Idle and who returns: thresholds, floors, the guard, and the windows behind them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import pytest

from collm_common.messages import InferenceReport
from collm_common.types import BatchSizes, ReplicaInfo, ReplicaState
from collm_launcher.loads import Loads
from collm_launcher.policy.idle import IdleRules, Load, burstiness, capacity, decide, ewma, quantile, stretch

SERVING, IDLE, COMBINED = ReplicaState.SERVING, ReplicaState.IDLE, ReplicaState.COMBINED
RULES = IdleRules(window=3, return_ticks=2, alpha=0.25, decay=0.5, headroom=0.25)
POISSON = 1.0


def load(samples: Sequence[tuple[float, float]], state: ReplicaState = SERVING, b: float = 8) -> Load:
    return Load(state, b, b / 2, list(samples))


def steady(utilisation: float, batch: float, state: ReplicaState = SERVING, ticks: int = 3) -> Load:
    return load([(utilisation, batch)] * ticks, state)


def falls(loads: dict[str, Load], start_from: int | None = None, rules: IdleRules = RULES) -> list[str]:
    return [move.replica for move in decide(loads, rules, POISSON, start_from) if move.after is IDLE]


def test_newer_samples_weigh_more_and_the_weights_sum_to_one() -> None:
    """Weights that run from the wrong end, or that are not normalised."""
    assert ewma([0.4, 0.4, 0.4], 0.7) == pytest.approx(0.4)
    assert ewma([0, 1], 0.7) == pytest.approx(1 / (1 + math.exp(-0.7)))
    assert ewma([1, 0], 0.7) < 0.5 < ewma([0, 1], 0.7)
    assert ewma([1, 3], 0.0) == pytest.approx(2)


def test_a_quantile_interpolates_between_the_extremes() -> None:
    """A threshold that is off by one replica."""
    assert [quantile([3, 1, 2], alpha) for alpha in (0, 0.25, 0.5, 1)] == [1, 1.5, 2, 3]
    assert quantile([7], 0.3) == 7


def test_volatile_arrivals_stretch_the_windows_within_bounds() -> None:
    """A window that shrinks to nothing, grows for ever, or ignores bursts."""
    assert burstiness([]) == burstiness([0, 0, 0]) == 1
    assert burstiness([5, 5, 5]) == 0
    assert burstiness([0, 0, 30]) > 3
    assert [stretch(10, volatility) for volatility in (0, 1, 3, 100)] == [5, 10, 20, 40]
    assert stretch(1, 0) == 1


def test_a_lightly_loaded_replica_falls_idle_with_the_numbers_in_its_reason() -> None:
    """A replica that never falls idle because its load is equal to the threshold, or one that does while it works."""
    loads = {"busy": steady(0.5, 3), "light": steady(0.25, 2)}
    moves = decide(loads, RULES, POISSON, None)
    assert [(move.replica, move.before, move.after) for move in moves] == [("light", SERVING, IDLE)]
    assert "0.25" in moves[0].reason
    assert "2.00" in moves[0].reason


@pytest.mark.parametrize(("utilisation", "batch"), [(0.1, 4.0), (0.6, 0.5)])
def test_both_utilisation_and_batch_must_be_low(utilisation: float, batch: float) -> None:
    """A replica full of long requests that looks idle by one of the two figures alone."""
    busy = [steady(0.5, 2.5) for _ in range(3)]
    assert "odd" not in falls({"odd": steady(utilisation, batch), **{f"b{i}": one for i, one in enumerate(busy)}})


def test_a_busy_replica_does_not_fall_idle_for_being_the_only_one_known() -> None:
    """A quantile of one, which everything is at."""
    loads = {"busy": steady(0.8, 4), "new": steady(0, 0, ticks=0), "idle": steady(0, 0, IDLE)}
    assert falls(loads) == []


def test_nothing_is_decided_before_a_window_is_full() -> None:
    """A replica that has just started and has seen no traffic yet."""
    loads = {"new": steady(0, 0, ticks=2), "busy": steady(0.8, 5)}
    assert falls(loads) == []
    loads["new"].observe(0, 0, keep=12)
    assert falls(loads) == ["new"]
    assert decide(loads, RULES, 3.0, None) == [], "bursty traffic asks for a longer window"


def test_the_guard_keeps_enough_to_carry_the_demand() -> None:
    """All replicas falling idle together, or so many that the rest is overloaded."""
    quiet = {f"r{i}": steady(0, 0) for i in range(3)}
    assert len(falls(quiet)) == 2, "one always stays"
    light = {f"r{i}": steady(0.2, 2) for i in range(4)}
    assert len(falls(light)) == 2, "8 sequences with a quarter to spare need two replicas of 8"


def test_when_enough_fall_idle_for_a_job_they_all_may() -> None:
    """Three of three replicas that never train because somebody must serve, though Combined ones do."""
    light = {f"r{i}": steady(0.2, 2) for i in range(3)}
    assert len(falls(light, start_from=None)) == 2
    assert len(falls(light, start_from=3)) == 3
    heavy = {f"r{i}": load([(0.2, 2)] * 3, b=2) for i in range(3)}
    assert falls(heavy, start_from=3) == [], "beside training they could not carry it"


def test_capacity_counts_every_state_as_what_it_serves() -> None:
    """Combined replicas taken for full ones."""
    loads = {"s": load([]), "i": load([], IDLE), "c": load([], COMBINED)}
    assert capacity(loads, ["i"], trains=[]) == 8 + 4
    assert capacity(loads, ["i"], trains=["i"]) == 8 + 4 + 4


def test_replicas_on_other_weights_do_not_make_up_the_number_for_a_job() -> None:
    """Three that fall idle for a job that two of them cannot start, while nobody serves."""
    quiet = {f"r{i}": steady(0, 0) for i in range(3)}
    quiet["r2"].base = "other"
    assert falls(quiet, start_from=3) == []
    quiet["r3"] = steady(0, 0)
    assert set(falls(quiet, start_from=3)) == {"r0", "r1", "r3"}, "the other one serves"
    quiet["r3"].able = False
    assert falls(quiet, start_from=3) == []


def test_nobody_falls_idle_to_wait_for_others() -> None:
    """Two that wait while the third has all their requests and can never be low, until they return in its lull."""
    loads = {"r1": steady(0, 0), "r2": steady(0, 0), "r3": steady(0.8, 4)}
    assert falls(loads, start_from=3) == []
    loads["r3"] = steady(0, 0)
    assert len(falls(loads, start_from=3)) == 3


def test_a_replica_that_returns_makes_up_no_number() -> None:
    """The third that falls idle in the very tick in which the first gives up waiting for it."""
    loads = {"r1": steady(0, 0, IDLE), "r2": steady(0, 0), "r3": steady(0, 0)}
    loads["r1"].idle_ticks = 100
    moves = decide(loads, RULES, POISSON, 3)
    assert [(move.replica, move.after) for move in moves] == [("r1", SERVING)]


def test_a_replica_that_a_job_has_chosen_is_not_taken_back() -> None:
    """A job that loses its clients because the coordinator needs longer than T' ticks to come back."""
    loads = {"r1": steady(0, 0, IDLE), "r2": steady(0.8, 4)}
    loads["r1"].chosen = True
    for _ in range(10):
        assert decide(loads, RULES, POISSON, 3) == []
    loads["r1"].chosen = False
    moves = [decide(loads, RULES, POISSON, None) for _ in range(3)]
    assert [len(move) for move in moves] == [0, 0, 1]


def test_an_unchosen_replica_returns_and_is_judged_anew() -> None:
    """A replica that stays Idle for ever, or flaps because its old samples are still there."""
    loads = {"r1": steady(0, 0, IDLE), "r2": steady(0.8, 4)}
    assert decide(loads, RULES, POISSON, None) == []
    assert decide(loads, RULES, POISSON, None) == []
    (move,) = decide(loads, RULES, POISSON, None)
    assert (move.replica, move.before, move.after) == ("r1", IDLE, SERVING)
    loads["r1"].become(SERVING, 2)
    assert loads["r1"].samples == []
    assert loads["r1"].idle_ticks == 0
    assert falls(loads) == []


def report(replica: str, utilisation: float, batch: float, finished: int = 0) -> InferenceReport:
    return InferenceReport(
        replica=replica,
        state=SERVING,
        time_s=0,
        utilisation=utilisation,
        memory_bytes=0,
        queue=0,
        running=0,
        mean_batch=batch,
        limit=8,
        train_batch=0,
        finished=finished,
    )


def info(replica: str, **changes: object) -> ReplicaInfo:
    base = ReplicaInfo(replica, "m", "i", SERVING, ready=True, infer_batch_max=8, context_tokens=64)
    return msgspec.structs.replace(base, **changes)


def test_reports_of_one_tick_make_one_sample() -> None:
    """A window in seconds of telemetry instead of ticks, or one that counts silence as idleness."""
    loads = Loads(IdleRules(window=2, headroom=0), 0.5)
    replicas = {"r1": info("r1"), "r2": info("r2"), "dead": info("dead", alive=False)}
    for _ in range(2):
        for utilisation in (0.0, 0.2):
            loads.hear(report("r1", utilisation, 1))
        loads.hear(report("r2", 0.9, 4, finished=3))
        loads.hear(report("dead", 0, 0))
        loads.tick(replicas, {})
    (move,) = loads.moves("m", replicas, None)
    assert move.replica == "r1"
    assert "0.10" in move.reason
    loads.tick({}, {})
    assert loads.moves("m", {}, None) == []


def test_a_combined_replica_counts_with_what_the_coordinator_gave_it() -> None:
    """A guard that believes an estimate when the truth is known."""
    combined = {f"c{i}": info(f"c{i}", state=COMBINED) for i in range(3)}
    replicas = {"light": info("light"), **combined}
    for infer, falling in ((8, ["light"]), (1, [])):
        loads = Loads(IdleRules(window=2, headroom=0.25), 0.5)
        for _ in range(2):
            for id_ in replicas:
                loads.hear(report(id_, 0.1, 1))
            loads.tick(replicas, {id_: BatchSizes(1, infer) for id_ in combined})
        assert [move.replica for move in loads.moves("m", replicas, None)] == falling


def test_the_registry_says_who_is_chosen_and_on_which_weights() -> None:
    """A policy that knows of jobs and bases, and a loop that never tells it."""
    idle = {"r1": info("r1", state=IDLE, job="j", base_digest="d"), "r2": info("r2", state=IDLE)}
    loads = Loads(RULES, 0.5)
    moves = []
    for _ in range(4):
        loads.tick(idle, {})
        moves += loads.moves("m", idle, None)
    assert {move.replica for move in moves} == {"r2"}
    replicas = {id_: info(id_, base_digest=digest) for id_, digest in zip("abc", ("x", "x", "y"), strict=True)}
    for start_from, falling in ((3, 0), (2, 2)):
        for _ in range(3):
            for id_ in replicas:
                loads.hear(report(id_, 0, 0))
            loads.tick(replicas, {})
        assert len(loads.moves("m", replicas, start_from)) == falling


def test_the_least_busy_of_overloaded_replicas_stays() -> None:
    """Replicas that fall idle in the middle of a burst, because one of them is always at the lower quantile."""
    loads = {"a": steady(0.9, 1), "b": steady(0.8, 1), "c": steady(0.6, 0.5)}
    assert decide(loads, RULES, POISSON, None) == []
