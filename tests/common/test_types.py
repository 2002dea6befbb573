"""Deadlines, SLO arithmetic and adapter names."""

from __future__ import annotations

import pytest

from collm_common.types import AdapterRef, Slo


def test_the_deadline_is_the_earliest_end_the_objective_allows() -> None:
    """A deadline that ignores one of its limits."""
    assert Slo("a", e2e_s=2.0).deadline(10.0, 100) == 12.0
    assert Slo("a", ttft_s=1.0, tpot_s=0.1).deadline(10.0, 11) == pytest.approx(12.0)
    assert Slo("a", ttft_s=1.0, tpot_s=0.1, e2e_s=1.5).deadline(10.0, 11) == 11.5
    assert Slo("a", ttft_s=1.0).deadline(10.0, 11) == 11.0
    assert Slo("a").deadline(10.0, 11) == float("inf")


def test_every_limit_must_hold() -> None:
    """An SLO that counts as met though one of several limits is broken."""
    slo = Slo("a", ttft_s=1.0, tpot_s=0.1, e2e_s=3.0)
    assert slo.met(ttft_s=1.0, e2e_s=2.0, tokens=11)
    assert not slo.met(ttft_s=1.1, e2e_s=2.0, tokens=11)
    assert not slo.met(ttft_s=1.0, e2e_s=2.2, tokens=11)
    assert not slo.met(ttft_s=1.0, e2e_s=3.1, tokens=1000)
    assert slo.met(ttft_s=0.5, e2e_s=0.5, tokens=1)


@pytest.mark.parametrize("text", ["a@v1", "team/a.b@v12.3"])
def test_an_adapter_reference_reads_back(text: str) -> None:
    """A pinned version that is parsed to another one."""
    assert str(AdapterRef.parse(text)) == text


@pytest.mark.parametrize("text", ["a", "@v1", "a@v", "a@vx", "a@v1.", "a@v1.2.3"])
def test_a_malformed_reference_is_refused(text: str) -> None:
    """A typo that silently serves another version."""
    with pytest.raises(ValueError, match="name@v3"):
        AdapterRef.parse(text)
