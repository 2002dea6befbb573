"""What the coordinator knows of one replica: samples, requests, training, and the laws that follow."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from msgspec import Struct

from collm_common.latency import LatencyModel
from collm_common.messages import InferenceReport, TrainReport
from collm_common.types import BatchSizes
from collm_coordinator.drift import Drift
from collm_coordinator.latency_fit import Refusal
from collm_coordinator.laws import Measured, Shape, fit_laws
from collm_coordinator.objectives import Objectives
from collm_coordinator.progress import Progress
from collm_coordinator.samples import Grid, Keep, alone, beside
from collm_coordinator.traffic import Traffic


class Comparison(Struct, frozen=True):
    """Measured seconds of one report beside the law's: `part` is alone, infer or train; `drifted` a lasting shift."""

    part: str
    predicted_s: float
    measured_s: float
    drifted: float | None = None

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s


@dataclass
class ReplicaModel:
    """Bounded: two grids and a few sums. `version` grows with every sample, so that nothing is fitted twice.

    `share` is the trainer's SM share as last heard; `shares` those that it can be given.
    """

    infer: Grid = field(default_factory=Grid)
    train: Grid = field(default_factory=Grid)
    traffic: Traffic = field(default_factory=Traffic)
    objectives: Objectives = field(default_factory=Objectives)
    progress: Progress = field(default_factory=Progress)
    laws: dict[float, LatencyModel] = field(default_factory=dict)
    drifts: dict[str, Drift] = field(default_factory=dict)
    share: float = 1.0
    shares: tuple[float, ...] = ()
    running: int | None = None
    version: int = 0
    fitted: int = -1

    @property
    def latency(self) -> LatencyModel | None:
        """The law at the present SM share; without one there, what is known without training."""
        if (law := self.laws.get(self.share)) is not None or not self.laws:
            return law
        other = next(iter(self.laws.values()))
        line = other.alone or other.infer
        return LatencyModel(line, None, other.prefill_s_per_token, other.output_tokens, other.alone, self.share)

    @property
    def measured(self) -> Measured:
        """Its samples."""
        return Measured(self.infer, self.train)

    def observe_inference(self, report: InferenceReport) -> list[Comparison]:
        """One report of the inference process; how it compares with what was expected."""
        found = self._compare_inference(report)
        for iteration in report.iterations:
            self.infer.add(iteration.sizes, iteration.mean_s, iteration.count)
            self.version += 1
            if iteration.sizes.train:
                self.share = iteration.sizes.sm_share
        self.running = max(1, round(report.mean_batch))
        self.shares = report.sm_shares
        self.traffic.observe(report)
        self.objectives.observe(report.time_s, report.served)
        return found

    def observe_training(self, report: TrainReport) -> list[Comparison]:
        """One optimiser step. b is the batch that ran beside it, if that is known: the report has only its limit."""
        infer = report.sizes.infer if self.running is None else self.running
        sizes = BatchSizes(report.sizes.train, infer, report.sizes.sm_share)
        self.share = sizes.sm_share
        law = self.laws.get(self.share)
        predicted_s = law.micro_step_s(sizes.train, infer) if law else None
        found = self._compare("train", beside(self.share), predicted_s or 0.0, report.step_s)
        self.train.add(sizes, report.step_s)
        self.progress.observe(report)
        self.version += 1
        return found

    def refit(self, peers: Collection[ReplicaModel]) -> Refusal | None:
        """Fit anew what has new samples; a refusal leaves the laws that were accepted last.

        `peers` are replicas of the same model on equal hardware, this one among them.
        """
        if self.fitted == self.version:
            return None
        self.fitted = self.version
        before = self.latency
        known = self.traffic.known or before is None
        output_tokens = self.traffic.mean_output_tokens if known or before is None else before.output_tokens
        shape = Shape(self.traffic.prefill_s_per_token, output_tokens)
        laws = fit_laws(self.measured, [peer.measured for peer in peers], shape, self.laws)
        if isinstance(laws, Refusal):
            return laws
        self.laws = laws
        return None

    def _compare_inference(self, report: InferenceReport) -> list[Comparison]:
        """Iterations alone and beside training, each as the mean over all of the report's that have a law."""
        sums: dict[str, tuple[float, float, int]] = {}
        share = self.share
        for iteration in report.iterations:
            sizes = iteration.sizes
            law = self.laws.get(sizes.sm_share) if sizes.train else self.latency
            if law is None or (not sizes.train and law.alone is None):
                continue
            share = sizes.sm_share if sizes.train else share
            part = "infer" if sizes.train else "alone"
            predicted_s, measured_s, count = sums.get(part, (0.0, 0.0, 0))
            predicted_s += iteration.count * law.iteration_s(sizes.train, sizes.infer)
            sums[part] = predicted_s, measured_s + iteration.count * iteration.mean_s, count + iteration.count
        keeps = {"alone": alone, "infer": beside(share)}
        return [
            comparison
            for part, (predicted_s, measured_s, count) in sums.items()
            for comparison in self._compare(part, keeps[part], predicted_s / count, measured_s / count)
        ]

    def _compare(self, part: str, keep: Keep, predicted_s: float, measured_s: float) -> list[Comparison]:
        """After a lasting shift, what was measured before it is scaled to the present."""
        if predicted_s <= 0 or not math.isfinite(measured_s):
            return []
        factor = self.drifts.setdefault(part, Drift()).observe(measured_s / predicted_s)
        if factor is not None:
            (self.train if part == "train" else self.infer).rescale(factor, keep)
            self.version += 1
        return [Comparison(part, predicted_s, measured_s, factor)]
