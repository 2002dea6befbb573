"""What the launcher has heard about the load, brought to one sample a tick and replica."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from statistics import fmean

from collm_common.messages import InferenceReport
from collm_common.types import BatchSizes, ReplicaInfo, ReplicaState
from collm_launcher.policy.idle import MAX_STRETCH, IdleRules, Load, Move, burstiness, decide


class Loads:
    """Windows of utilisation and batch by replica, and counts of requests by model.

    A replica that trains keeps `combined_share` of its b, until the coordinator has said how much it really is.
    """

    def __init__(self, rules: IdleRules, combined_share: float) -> None:
        self._rules, self._combined_share = rules, combined_share
        self._keep = MAX_STRETCH * rules.window
        self._loads: dict[str, Load] = {}
        self._reports: dict[str, list[InferenceReport]] = {}
        self._arrivals: dict[str, deque[float]] = {}

    def hear(self, report: InferenceReport) -> None:
        """Keep a report until the next tick."""
        self._reports.setdefault(report.replica, []).append(report)

    def tick(self, replicas: Mapping[str, ReplicaInfo], sizes: Mapping[str, BatchSizes]) -> None:
        """Turn the reports since the last tick into one sample each; forget replicas that left."""
        reports, self._reports = self._reports, {}
        self._loads = {id_: load for id_, load in self._loads.items() if id_ in replicas}
        finished: dict[str, float] = {}
        for id_, info in replicas.items():
            load = self._loads.setdefault(id_, Load(info.state, 0.0, 0.0))
            load.become(info.state, self._rules.return_ticks)
            load.base, load.chosen = info.base_digest, bool(info.job)
            load.capacity = info.infer_batch_max
            load.combined_capacity = self._combined(info, sizes.get(id_))
            if new := reports.get(id_):
                load.observe(fmean(r.utilisation for r in new), fmean(r.mean_batch for r in new), self._keep)
                finished[info.model] = finished.get(info.model, 0.0) + sum(report.finished for report in new)
        for model, count in finished.items():
            self._arrivals.setdefault(model, deque(maxlen=self._keep)).append(count)

    def moves(
        self,
        model: str,
        replicas: Mapping[str, ReplicaInfo],
        start_from: int | None,
        able: Callable[[ReplicaInfo], bool] = lambda info: True,
    ) -> list[Move]:
        """What `idle.decide` says about the usable replicas of one model, of which those that are `able` may train."""
        usable = [id_ for id_, info in replicas.items() if info.model == model and info.alive and info.ready]
        for id_ in usable:
            self._loads[id_].able = able(replicas[id_])
        volatility = burstiness(list(self._arrivals.get(model, ())))
        return decide({id_: self._loads[id_] for id_ in usable}, self._rules, volatility, start_from)

    def moved(self, move: Move) -> None:
        """A move was made: samples of the state before it do not count in the one after it."""
        if (load := self._loads.get(move.replica)) is not None:
            load.become(move.after, self._rules.return_ticks)

    def _combined(self, info: ReplicaInfo, sizes: BatchSizes | None) -> float:
        if info.state is ReplicaState.COMBINED and sizes is not None:
            return min(sizes.infer, info.infer_batch_max)
        return self._combined_share * info.infer_batch_max
