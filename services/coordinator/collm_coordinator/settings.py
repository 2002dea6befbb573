"""Settings of the coordinator (COLLM_COORDINATOR_*)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from collm_common.settings import Common
from collm_common.types import AtLeastOne, Fraction, Positive, Slo


class CoordinatorSettings(Common, frozen=True, kw_only=True):
    """`slo` is what Combined replicas must keep (JSON: ttft_s, tpot_s, e2e_s). B is at most `max_train_batch`.

    A Combined replica keeps at least `min_infer_share` of the engine's limit as b.
    """

    slo: Slo = Slo(name="default")
    max_train_batch: AtLeastOne = 8
    first_train_max: AtLeastOne = 4
    min_infer_share: Fraction = 0.25
    fit_s: Positive = 5.0
    lease_ttl_s: Positive = 5.0
    seed: Annotated[int, Meta(ge=0)] = 0
