"""What a run amounts to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collm_common.types import Slo
from collm_tools.load import metrics
from collm_tools.load.client import RequestRecord

SLO = Slo(name="s", ttft_s=1.0, tpot_s=0.5, e2e_s=4.0)


def answer(ttft_s: float = 0.5, e2e_s: float = 2.0, tokens: int = 10, ce: float | None = 2.0) -> RequestRecord:
    record = RequestRecord(at_s=0, outcome="completed", ttft_s=ttft_s, e2e_s=e2e_s, output_tokens=tokens)
    record.cross_entropy, record.reference_tokens = ce, 4
    return record


RECORDS = st.lists(
    st.builds(
        RequestRecord,
        at_s=st.floats(0, 100),
        outcome=st.sampled_from(["completed", "rejected", "failed"]),
        ttft_s=st.none() | st.floats(0, 3),
        e2e_s=st.none() | st.floats(0, 9),
        output_tokens=st.integers(0, 50),
        cross_entropy=st.none() | st.floats(0.1, 9),
        reference_tokens=st.integers(1, 9),
    ),
    max_size=30,
)


@given(RECORDS)
def test_every_offered_request_is_counted_once(records: list[RequestRecord]) -> None:
    """Catches failed requests vanishing from the results."""
    summary = metrics.summarize(records, SLO, 100.0)
    found = summary.requests
    assert found.offered == found.completed + found.rejected + found.failed == len(records)
    assert 0 <= summary.slo_attainment <= 1
    assert summary.goodput_tokens_per_s <= summary.throughput_tokens_per_s + 1e-9


@pytest.mark.parametrize("outcome", ["rejected", "failed"])
def test_a_request_without_an_answer_is_a_miss(outcome: str) -> None:
    """Catches attainment over completed requests only, which shedding inflates."""
    miss = RequestRecord(at_s=0, outcome=outcome, ttft_s=0.1, e2e_s=0.2, output_tokens=99)  # type: ignore[arg-type]
    summary = metrics.summarize([answer(), miss], SLO, 10.0)
    assert summary.slo_attainment == 0.5
    assert summary.goodput_tokens_per_s == 1.0
    assert summary.request_goodput_per_s == 0.1


@pytest.mark.parametrize("late", [answer(ttft_s=1.1), answer(e2e_s=4.1), answer(ttft_s=0.1, e2e_s=3.0, tokens=3)])
def test_one_broken_limit_is_enough_for_a_miss(late: RequestRecord) -> None:
    """Catches limits joined by or."""
    assert metrics.summarize([late], SLO, 1.0).slo_attainment == 0


def test_q_goodput_weighs_tokens_by_inverse_cross_entropy() -> None:
    """Catches the mean of the quality in place of a token's own."""
    summary = metrics.summarize([answer(ce=2.0), answer(ce=0.5, tokens=4), answer(ce=None)], SLO, 10.0)
    assert summary.q_goodput == pytest.approx((10 / 2 + 4 / 0.5) / 10)


def test_without_references_there_is_no_quality() -> None:
    """Catches a zero that would read as the worst quality."""
    summary = metrics.summarize([answer(ce=None)], SLO, 10.0)
    assert summary.q_goodput is None
    assert summary.cross_entropy is None


def test_cross_entropy_is_a_mean_over_tokens() -> None:
    """Catches short references weighing as much as long ones."""
    long, short = answer(ce=1.0), answer(ce=5.0)
    long.reference_tokens, short.reference_tokens = 30, 10
    assert metrics.cross_entropy([long, short]) == pytest.approx(2.0)


def test_percentiles_are_values_that_occurred() -> None:
    """Catches an off-by-one rank."""
    found = metrics.percentiles([float(n) for n in range(1, 101)])
    assert found == {"mean": 50.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99}
    assert metrics.percentiles([]) == {}


def test_no_requests_are_no_division() -> None:
    """Catches a crash at the end of an empty run."""
    assert metrics.summarize([], SLO, 0.0).requests.offered == 0
