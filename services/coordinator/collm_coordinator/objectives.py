"""Which latency objective a replica must keep: the tightest of the classes that it serves (paper section 5.3, tau')."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from collm_common.messages import Served
from collm_common.types import Slo
from collm_coordinator.traffic import faded

MEMORY_S = 60.0
LEAST_SHARE = 0.05
QUEUE_SHARE = 0.5
LIMITS = ("ttft_s", "tpot_s", "e2e_s")


@dataclass
class Objectives:
    """Requests by objective, older ones fading. One with less than LEAST_SHARE of the requests does not bind."""

    counts: dict[Slo, float] = field(default_factory=dict)
    last_s: float = 0.0

    def observe(self, time_s: float, served: Iterable[Served]) -> None:
        """Fold in what one report says came in."""
        keep = faded(time_s - self.last_s, MEMORY_S) if self.last_s else 1.0
        self.last_s = time_s
        faint = {slo: keep * count for slo, count in self.counts.items()}
        self.counts = {slo: count for slo, count in faint.items() if count >= 0.01}
        for one in served:
            self.counts[one.slo] = self.counts.get(one.slo, 0.0) + one.requests

    def binding(self, base: Slo, feasible: Callable[[Slo], bool]) -> Slo:
        """`base` with every limit as tight as that of any class that binds and is `feasible` at all.

        A class that nothing could keep must not slow the others down for nothing.
        """
        least = LEAST_SHARE * sum(self.counts.values())
        classes = [slo for slo, count in self.counts.items() if count >= least and feasible(slo)]
        return msgspec.structs.replace(base, **{limit: _tightest([base, *classes], limit) for limit in LIMITS})


def queue_that_counts(slo: Slo, queue_s: float) -> float:
    """Queueing latency to take off the SLO: at most QUEUE_SHARE of it.

    More is overload, in which smaller batches would only make the queue longer.
    """
    limits = [limit for limit in (slo.ttft_s, slo.e2e_s) if limit is not None]
    return min([queue_s, *(QUEUE_SHARE * limit for limit in limits)])


def _tightest(slos: Iterable[Slo], limit: str) -> float | None:
    values = [getattr(slo, limit) for slo in slos if getattr(slo, limit) is not None]
    return min(values, default=None)
