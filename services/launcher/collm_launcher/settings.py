"""Settings of the launcher (COLLM_LAUNCHER_*)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from collm_common.settings import Common
from collm_common.types import Name, Positive
from collm_launcher.policy.idle import IdleRules
from collm_launcher.policy.job import Rules


class LauncherSettings(Common, frozen=True, kw_only=True):
    """`adapters` maps a served model to the adapter, or adapters, that its jobs train; another is never trained.

    `idle` and `rules` are JSON objects. A new job waits `cooldown_s` after the last one of its adapter; of several
    adapters the one that waited longest is next, and each may have a job of its own at the same time.
    `combined_share` is the share of its b that a replica is expected to keep while it trains.
    """

    adapters: dict[Name, Name | tuple[Name, ...]] = {}
    idle: IdleRules = IdleRules()
    rules: Rules = Rules()
    tick_s: Positive = 1.0
    cooldown_s: Annotated[float, Meta(ge=0)] = 60.0
    combined_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    lease_ttl_s: Positive = 5.0
    keep_versions: Annotated[int, Meta(ge=1)] = 4
    seed: Annotated[int, Meta(ge=0)] = 0

    def adapters_of(self, model: str) -> tuple[str, ...]:
        """None for a model that is not trained."""
        named = self.adapters.get(model, ())
        return (named,) if isinstance(named, str) else named
