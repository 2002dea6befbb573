"""Settings of the coordinator (COLLM_COORDINATOR_*)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from collm_common.settings import Common
from collm_common.types import AtLeastOne, BatchSizes, Count, Fraction, Positive, Slo
from collm_coordinator.advisor import Rules


class CoordinatorSettings(Common, frozen=True, kw_only=True):
    """`slo` is what Combined replicas must keep beside the objectives of their requests (JSON: ttft_s, tpot_s, e2e_s).

    B is at most `max_train_batch`; b at least `min_infer_share` of the engine's limit, and enough for the load with
    `headroom` and a backlog that is gone in `drain_s`. In the first round B changes every `probe_steps` (0: never).
    With `fixed` (JSON: train, infer) every replica that trains gets these sizes, and nothing is probed or chosen.
    `metrics_port` 0 is off.
    """

    slo: Slo = Slo(name="default")
    max_train_batch: AtLeastOne = 8
    first_train_max: AtLeastOne = 4
    min_infer_share: Fraction = 0.25
    headroom: Annotated[float, Meta(ge=0)] = 0.2
    drain_s: Positive = 2.0
    probe_steps: Count = 2
    fit_s: Positive = 5.0
    lease_ttl_s: Positive = 5.0
    metrics_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    seed: Count = 0
    fixed: BatchSizes | None = None

    @property
    def rules(self) -> Rules:
        """What choices keep to."""
        return Rules(self.slo, self.max_train_batch, self.min_infer_share, self.headroom, self.drain_s)
