"""What the coordinator knows of one replica: samples, request shape, noise scale, and the models that follow."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from collm_common.latency import LatencyModel, Line
from collm_common.messages import InferenceReport, TrainReport
from collm_common.types import BatchSizes
from collm_coordinator.latency_fit import Refusal, fit
from collm_coordinator.samples import Grid

DECAY = 0.8
FORGET = 0.95


@dataclass
class ReplicaModel:
    """Bounded: two grids and a few averages. `version` grows with every sample, so that nothing is fitted twice."""

    infer: Grid = field(default_factory=Grid)
    train: Grid = field(default_factory=Grid)
    latency: LatencyModel | None = None
    first_batch: int = 0
    noise_scale: float = 0.0
    queue: float = 0.0
    version: int = 0
    fitted: tuple[bool, int] = (False, -1)
    _prompt_tokens: float = 0.0
    _prefill_s: float = 0.0
    _output_tokens: float = 0.0
    _finished: float = 0.0
    _elapsed_s: float = 0.0
    _last_s: float = 0.0

    def observe_inference(self, report: InferenceReport) -> None:
        """One report of the inference process."""
        for iteration in report.iterations:
            self.infer.add(iteration.sizes, iteration.mean_s, iteration.count)
            self.version += 1
        elapsed_s = report.time_s - self._last_s if self._last_s else 0.0
        self._last_s = report.time_s
        for name, value in (
            ("_prompt_tokens", report.prefill_tokens),
            ("_prefill_s", report.prefill_s),
            ("_output_tokens", report.output_tokens),
            ("_finished", report.finished),
            ("_elapsed_s", elapsed_s),
        ):
            setattr(self, name, FORGET * getattr(self, name) + value)
        self.queue = DECAY * self.queue + (1 - DECAY) * report.queue

    def observe_training(self, report: TrainReport) -> None:
        """One optimiser step; B and b are those it ran beside."""
        self.train.add(BatchSizes(report.sizes.train, max(1, report.sizes.infer)), report.step_s)
        self.first_batch = self.first_batch or report.sizes.train
        if report.noise_scale is not None and math.isfinite(report.noise_scale):
            self.noise_scale = report.noise_scale
        self.version += 1

    @property
    def prompt_tokens(self) -> float:
        """Of a recent request."""
        return self._prompt_tokens / self._finished if self._finished >= 1 else 0.0

    @property
    def output_tokens(self) -> float:
        """L, of a recent request."""
        return max(1.0, self._output_tokens / self._finished) if self._finished >= 1 else 1.0

    @property
    def queue_s(self) -> float:
        """What a request waits in the engine, by Little's law."""
        rate = self._finished / self._elapsed_s if self._elapsed_s > 0 else 0.0
        return self.queue / rate if rate > 0 else 0.0

    def refit(self, combined: bool) -> Refusal | None:
        """Fit the samples of the state it is in; a refusal leaves the last accepted model."""
        if self.fitted == (combined, self.version):
            return None
        self.fitted = (combined, self.version)
        before = self.latency
        points = self.infer.points(lambda sizes: combined or sizes.train == 0)
        infer = fit(points, before.infer if before else None)
        if isinstance(infer, Refusal):
            return infer
        train: Line | None = before.train if before else None
        fitted = fit(self.train.points(), train)
        if isinstance(fitted, Line):
            train = fitted
        per_token_s = self._prefill_s / self._prompt_tokens if self._prompt_tokens else 0.0
        self.latency = LatencyModel(infer, train, per_token_s, self.output_tokens)
        return None
