"""What the dispatcher learns as it goes: lengths, drift, streams, and the modes that follow from them."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collm_common.latency import LatencyModel, Line
from collm_common.types import Slo
from collm_dispatcher.policy.drift import Drift
from collm_dispatcher.policy.lengths import Lengths
from collm_dispatcher.policy.outlook import Fit, fastest, modes
from collm_dispatcher.policy.streams import MEMORY_S, Stream, Streams

lengths = st.lists(st.integers(1, 4000), min_size=1, max_size=200)


FADED = 0.06
"""What 200 later answers take from the weight of the first, as a shift of the level."""


def _at(ordered: list[int], level: float) -> int:
    return ordered[min(len(ordered) - 1, max(0, math.ceil(level * len(ordered)) - 1))]


def learned(values: list[int]) -> Lengths:
    found = Lengths()
    for tokens in values:
        found.observe(tokens)
    return found


@given(lengths)
def test_quantiles_are_those_of_what_was_seen(values: list[int]) -> None:
    """A quantile off by more than a bucket: the batch is made for other answers than those that come."""
    found, ordered = learned(values).quantiles(10), sorted(values)
    assert len(found) == 10
    assert list(found) == sorted(found)
    for level, tokens in enumerate(found, 1):
        low, high = (_at(ordered, level / 10 + shift) for shift in (-FADED, FADED))
        assert low / 1.05 <= tokens <= high * 1.05


@given(lengths)
def test_the_mean_is_that_of_what_was_seen(values: list[int]) -> None:
    """A pace lambda = b / S made from another mean than that of the answers."""
    assert math.isclose(learned(values).mean, sum(values) / len(values), rel_tol=0.06)


def test_a_stream_that_changes_is_learned_anew() -> None:
    """Lengths of last month that still rule."""
    found = learned([10] * 5000 + [1000] * 10000)
    assert found.quantiles(10)[0] > 900


def test_a_long_life_keeps_the_numbers_finite() -> None:
    """Weights that grow for ever: after some days every quantile is not a number."""
    found = learned([7] * 100_000)
    assert math.isclose(found.mean, 7)
    assert found.quantiles(2) == pytest.approx((7, 7), rel=0.05)


@given(factor=st.floats(0.4, 2.5))
def test_drift_finds_a_constant_error(factor: float) -> None:
    """A correction that is applied on top of itself and runs away."""
    drift = Drift()
    for _ in range(400):
        corrected = drift.factor
        drift.observe(0.01 * corrected, corrected, 0.01 * factor)
    assert math.isclose(drift.factor, factor, rel_tol=0.012)


def test_drift_says_nothing_before_it_knows_and_never_much() -> None:
    """One stalled request that triples every prediction, or a factor that nobody can come back from."""
    drift = Drift()
    drift.observe(0.01, 1.0, 10.0)
    assert drift.factor == 1.0
    for _ in range(1000):
        drift.observe(0.01, 1.0, 10.0)
    assert drift.factor <= 3.0 + 1e-9
    drift.observe(0.0, 1.0, 1.0)
    drift.observe(1.0, 1.0, 0.0)
    assert drift.factor <= 3.0 + 1e-9


def test_a_stream_is_news_when_it_wakes_and_forgotten_when_it_sleeps() -> None:
    """A new stream that nobody plans for until the next tick, or an old one that limits everybody's batch for ever."""
    streams = Streams()
    assert streams.arrived("a", Slo("s"), 10, 1.0)
    assert not streams.arrived("a", Slo("s"), 10, 2.0)
    assert streams.arrived("a", Slo("s", e2e_s=1.0), 10, 3.0)
    assert [*streams.lately(3.0 + MEMORY_S)] == ["a"]
    assert [*streams.lately(4.0 + MEMORY_S)] == []
    assert [*streams.lately(4.0 + MEMORY_S, ["a"])] == ["a"]
    assert streams.arrived("a", Slo("s", e2e_s=1.0), 10, 9.0 + MEMORY_S)


def test_a_mode_follows_the_answers_not_the_prior() -> None:
    """A fit's guess of the length that is used although hundreds of answers were seen."""
    model = LatencyModel(infer=Line(base_s=0.01, per_sequence_s=0.001), output_tokens=10)
    stream = Stream(Slo("s", e2e_s=1.0))
    stream.arrived(stream.slo, 100, 1.0)
    prior = Fit(model, 64).mode(stream)
    draw = random.Random(1)
    for _ in range(500):
        stream.answered(draw.randint(35, 45), 0)
    stream.observe(1.0)
    learned_mode = Fit(model, 64).mode(stream)
    assert prior.b == 64
    assert 6 <= learned_mode.b <= 16
    assert Fit(None, 7).mode(stream).b == 7


def test_replicas_that_are_alike_are_looked_at_once_and_told_apart_from_others() -> None:
    """A mode of one replica that another one with its own limits or latencies is given."""
    model = LatencyModel(infer=Line(base_s=0.01, per_sequence_s=0.001), output_tokens=10)
    stream = Stream(Slo("s", e2e_s=0.5))
    fits = [Fit(model, 64), Fit(model, 64), Fit(model, 2), Fit(model, 64, scale=1.5)]
    found = modes(fits, {"s": stream})
    assert len(found) == 3
    assert all(found[fit]["s"] == fit.mode(stream) for fit in fits)


def test_what_a_stream_costs_changes_when_it_is_observed() -> None:
    """A shape from before the prompts became longer that is used for ever."""
    stream = Stream(Slo("s"))
    stream.arrived(stream.slo, 100, 1.0)
    before = stream.shape(0.001, 10)
    for _ in range(100):
        stream.arrived(stream.slo, 1000, 2.0)
    assert stream.shape(0.001, 10) is before
    stream.observe(1.0)
    assert stream.shape(0.001, 10).prefill_s > 5 * before.prefill_s


def test_a_correction_makes_the_batch_smaller() -> None:
    """Measured latency that nobody acts on."""
    model = LatencyModel(infer=Line(base_s=0.01, per_sequence_s=0.001), output_tokens=10)
    stream = Stream(Slo("s", e2e_s=0.5))
    assert Fit(model, 64, scale=1.5).mode(stream).b < Fit(model, 64).mode(stream).b


def test_the_fastest_replica_decides_what_can_be_in_time() -> None:
    """A request that is refused because of a slow replica, or by a guess about one that nobody measured."""
    slow, fast = (LatencyModel(infer=Line(base_s=s), prefill_s_per_token=s / 10, output_tokens=10) for s in (0.2, 0.1))
    stream = Stream(Slo("s"))
    stream.arrived(stream.slo, 10, 1.0)
    pace = fastest([Fit(slow, 1), Fit(fast, 1)], stream)
    assert pace is not None
    assert pace.latest_start_s(100.0, 10, 99, Slo("s", e2e_s=2.0)) == pytest.approx(102.0 - 0.1 - 1.0)
    assert pace.latest_start_s(100.0, 10, 1, Slo("s", e2e_s=2.0)) == pytest.approx(102.0 - 0.1 - 0.1)
    assert pace.latest_start_s(100.0, 10, 99, Slo("s", e2e_s=0.5)) is None
    assert pace.latest_start_s(100.0, 10, 99, Slo("s", tpot_s=0.5)) is None
    assert pace.latest_start_s(100.0, 10, 99, Slo("s", ttft_s=0.5, tpot_s=0.5)) == pytest.approx(100.5 - 0.1 - 0.1)
    assert fastest([Fit(slow, 1), Fit(None, 1)], stream) is None
    assert fastest([], stream) is None
    assert fastest([Fit(fast, 1)], None) is None


def test_a_prompt_costs_what_has_to_be_computed_of_it() -> None:
    """A stream that is taken for ten times as slow as it is since its prompts are known, or one for as fast as that."""
    model = LatencyModel(infer=Line(base_s=0.01), prefill_s_per_token=1e-3, output_tokens=10)
    streams, slo, fit = Streams(), Slo("s", ttft_s=5.0), Fit(model, 1)
    for _ in range(200):
        for key, cached_tokens in (("known", 900), ("new", 0)):
            streams.arrived(key, slo, 1000, 1.0)
            streams.answered(key, 10, cached_tokens)
    known, new = streams.of("known"), streams.of("new")
    assert known is not None
    assert new is not None
    wanted = {"known": pytest.approx(0.1, rel=0.03), "new": pytest.approx(1.0, rel=0.03)}
    for key, stream in (("known", known), ("new", new)):
        assert fit.shape(stream).prefill_s == wanted[key]
        expected, pace = fit.expected(stream, 1000, 1), fastest([fit], stream)
        assert expected is not None
        assert expected.first_s - 0.01 == wanted[key]
        assert pace is not None
        assert pace.prefill_s_per_token * 1000 == wanted[key]
    for _ in range(200):
        streams.arrived("known", slo, 100, 2.0)
        streams.answered("known", 10, 0)
    assert known.computed == pytest.approx(1.0, abs=0.01)


def test_what_can_be_in_time_is_judged_amid_others() -> None:
    """A queue that under overload serves everybody at a moment that would do only for a request alone."""
    model = LatencyModel(infer=Line(base_s=0.01, per_sequence_s=0.001), prefill_s_per_token=1e-3, output_tokens=10)
    stream = Stream(Slo("s"))
    stream.arrived(stream.slo, 50, 1.0)
    alone, amid = fastest([Fit(model, 1)], stream), fastest([Fit(model, 16)], stream)
    assert alone is not None
    assert amid is not None
    slo = Slo("s", ttft_s=1.0)
    latest = [pace.latest_start_s(0.0, 50, 10, slo) for pace in (alone, amid)]
    assert latest[0] == pytest.approx(1.0 - 0.05 - 0.011)
    assert latest[1] is not None
    assert latest[1] < 0.9
