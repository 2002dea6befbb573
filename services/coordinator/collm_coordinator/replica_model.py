"""What the coordinator knows of one replica: samples, requests, training, and the laws that follow."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from collm_common.latency import LatencyModel, Line
from collm_common.messages import InferenceReport, TrainReport
from collm_common.types import BatchSizes
from collm_coordinator.comparison import Comparison, Timing, compare
from collm_coordinator.drift import Drift
from collm_coordinator.latency_fit import Refusal
from collm_coordinator.laws import Measured, Shape, fit_laws
from collm_coordinator.objectives import Objectives
from collm_coordinator.progress import Progress
from collm_coordinator.samples import Grid, alone, beside
from collm_coordinator.traffic import Traffic


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
        timings = self._timings(report)
        found = [one for part in timings for one in self._compare(part, timings[part])]
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
        timings = [Timing(sizes, report.step_s, 1, law.train)] if law and law.train else []
        found = self._compare("train", timings)
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

    def _timings(self, report: InferenceReport) -> dict[str, list[Timing]]:
        """The report's iterations that have a law, alone and beside training."""
        found: dict[str, list[Timing]] = {"alone": [], "infer": []}
        for iteration in report.iterations:
            part = "infer" if iteration.sizes.train else "alone"
            law = self.laws.get(iteration.sizes.sm_share) if iteration.sizes.train else self.latency
            line: Line | None = getattr(law, part, None)
            if line is not None:
                found[part].append(Timing(iteration.sizes, iteration.mean_s, iteration.count, line))
        return found

    def _compare(self, part: str, timings: Sequence[Timing]) -> list[Comparison]:
        """After a lasting shift, what was measured before it, and the laws from it, are scaled to the present.

        Where nothing was measured before, a law that is off is a bad guess, not a shift.
        """
        compared = compare(part, timings)
        if compared is None:
            return []
        grid = self.train if part == "train" else self.infer
        known = compare(part, [timing for timing in timings if timing.familiar(grid)])
        factor = self.drifts.setdefault(part, Drift()).observe(known.ratio) if known else None
        if factor is not None:
            share = timings[0].sizes.sm_share
            grid.rescale(factor, alone if part == "alone" else beside(share))
            self.laws = {at: _scaled(law, part, at == share, factor) for at, law in self.laws.items()}
            self.version += 1
        return [replace(compared, drifted=factor)]


def _scaled(law: LatencyModel, part: str, present: bool, factor: float) -> LatencyModel:
    """Iterations alone are the same at every SM share; the other parts belong to the present one."""
    line: Line | None = getattr(law, part)
    return replace(law, **{part: line.scaled(factor)}) if line is not None and (present or part == "alone") else law
