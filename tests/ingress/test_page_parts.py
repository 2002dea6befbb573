"""What the live page makes of events and reports: pure functions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collm_common.latency import LatencyModel, Line
from collm_common.messages import Event, JobChanged, ReplicaChanged, StateChanged
from collm_common.types import ReplicaInfo, ReplicaState
from collm_dispatcher.ingress.page.fits import fit
from collm_dispatcher.ingress.page.jobs import jobs, thinned
from collm_dispatcher.ingress.page.lanes import lanes
from collm_dispatcher.ingress.page.view import Measured, Span
from tests.ingress import planted

NOW_S = 1000.0
STATES = list(ReplicaState)


def info(state: ReplicaState = ReplicaState.SERVING, alive: bool = True) -> ReplicaInfo:
    return ReplicaInfo(
        id="r1", model="m", incarnation="i", state=state, ready=True, infer_batch_max=4, context_tokens=8, alive=alive
    )


def moved(before: ReplicaState, after: ReplicaState, at_s: float) -> StateChanged:
    return StateChanged(replica="r1", before=before, after=after, reason="", time_s=at_s)


def changed(what: str, at_s: float) -> ReplicaChanged:
    return ReplicaChanged(replica="r1", what=what, reason="", time_s=at_s)


def lane(*events: Event, alive: bool = True) -> list[tuple[str, float, float]]:
    spans = lanes([info(alive=alive)], events, 100.0, NOW_S)["r1"]
    return [(span.state, span.from_s, span.to_s) for span in spans]


def test_a_lane_shows_states_and_absences() -> None:
    """A replica shown as serving while it was away, or before it came."""
    assert lane() == [("serving", 100, 1000)]
    assert lane(moved(ReplicaState.IDLE, ReplicaState.SERVING, 400)) == [("idle", 100, 400), ("serving", 400, 1000)]
    assert lane(changed("up", 300)) == [("serving", 300, 1000)]
    away = [("serving", 100, 500), ("away", 500, 600), ("serving", 600, 1000)]
    assert lane(changed("restarting", 500), changed("up", 600)) == away
    assert lane(changed("finetune_restarting", 500)) == [("serving", 100, 1000)]
    assert lane(changed("down", 700), alive=False) == [("serving", 100, 700), ("away", 700, 1000)]


def test_events_from_before_the_window_set_its_first_state() -> None:
    """A replica that fell idle long ago and is shown as serving."""
    assert lane(moved(ReplicaState.SERVING, ReplicaState.IDLE, 10)) == [("idle", 100, 1000)]


@given(st.lists(st.tuples(st.floats(0, NOW_S), st.sampled_from(STATES), st.booleans()), max_size=12))
def test_spans_follow_one_another_up_to_now(steps: list[tuple[float, ReplicaState, bool]]) -> None:
    """Gaps, overlaps, neighbours of one state, or a lane that ends before now."""
    state, events = ReplicaState.SERVING, list[Event]()
    for at_s, after, flips in sorted(steps, key=lambda step: step[0]):
        events.append(changed("down" if after is ReplicaState.IDLE else "finetune_restarting", at_s))
        if not flips:
            events += [changed("up", at_s), moved(state, after, at_s)]
            state = after
    spans: list[Span] = lanes([info(state)], events, 100.0, NOW_S)["r1"]
    assert (spans[0].from_s, spans[-1].to_s) == (100.0, NOW_S)
    for one, next_ in pairwise(spans):
        assert one.to_s == next_.from_s
        assert one.state != next_.state
    assert all(span.from_s < span.to_s for span in spans)


def test_rounds_tell_what_became_of_them() -> None:
    """A rejected candidate shown as published, or quality that is not the candidate's."""
    events = planted.events(NOW_S)
    rejected = [e for e in events if not (e.__class__.__name__ == "AdapterPublished" and getattr(e, "version", 0) == 2)]
    (job,) = jobs(rejected, [], {})
    assert [(r.number, r.version, r.published) for r in job.rounds] == [(1, 1, True), (2, 2, False)]
    assert [round(r.held_out or 0, 3) for r in job.rounds] == [3.1, 2.4]
    assert job.adapter == "desk"
    assert job.losses["r1"] == [(NOW_S - 240, 3.9), (NOW_S - 110, 2.9)]


def test_a_job_whose_start_is_forgotten_is_not_shown() -> None:
    """A crash over a job of which only its last words are kept."""
    events = [event for event in planted.events(NOW_S) if not isinstance(event, JobChanged)]
    assert jobs(events, [], {}) == []


@given(st.integers(0, 1000))
def test_thinned_curves_keep_their_end_and_their_mean(count: int) -> None:
    """A curve that grows with the job, or loses its newest point."""
    curve = [(float(at), 2.0) for at in range(count)]
    thin = thinned(curve)
    assert len(thin) <= 120
    assert not curve or thin[-1] == curve[-1]


def test_a_fit_is_judged_by_what_it_claims() -> None:
    """An error that is measured against another line than the one drawn."""
    model = LatencyModel(infer=Line(0.2, 0.0, r2=0.9), alone=Line(0.1, 0.0, r2=0.8, sequence_identified=True))
    alone = fit("r1", model, [Measured(0, 2, 0.1, 5), Measured(0, 4, 0.2, 5)], 8)
    assert alone.error == pytest.approx(0.25)
    assert (alone.r2, alone.sure, alone.lines) == (0.8, True, {0: [(1.0, 0.1), (8.0, 0.1)]})
    both = fit("r1", model, [Measured(0, 2, 0.1, 5), Measured(3, 2, 0.2, 5)], 8)
    assert (both.error, both.sure, list(both.lines)) == (0.0, False, [0, 3])
    assert fit("r1", None, [], 8).lines == {}
