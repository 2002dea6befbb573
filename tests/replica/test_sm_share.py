"""The share of the SMs as the environment says it."""

from __future__ import annotations

import pytest

from collm_common.errors import SettingsError
from collm_replica.sm_share import VARIABLE, sm_share


def test_a_share_is_a_fraction_of_the_percentage() -> None:
    """Fits of a limited trainer mixed with those of an unlimited one."""
    assert sm_share({}) == 1
    assert sm_share({VARIABLE: "30"}) == pytest.approx(0.3)


@pytest.mark.parametrize("text", ["", "many", "0", "130", "-5", "nan"])
def test_what_is_no_percentage_is_named(text: str) -> None:
    """A typing error that CUDA takes for no limit at all."""
    with pytest.raises(SettingsError, match=VARIABLE):
        sm_share({VARIABLE: text})
