"""What the coordinator knows of one replica: samples, request shape, noise scale, and the models that follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from collm_common.latency import LatencyModel, Line
from collm_common.messages import InferenceReport, TrainReport
from collm_common.types import BatchSizes
from collm_coordinator.latency_fit import Refusal, fit, proportional
from collm_coordinator.samples import Grid, Point, pooled

DECAY = 0.8
FORGET = 0.95


@dataclass
class Traffic:
    """Sums over recent reports, older ones fading; what requests look like and how long they wait."""

    prompt_tokens: float = 0.0
    prefill_s: float = 0.0
    output_tokens: float = 0.0
    finished: float = 0.0
    elapsed_s: float = 0.0
    queue: float = 0.0
    last_s: float = 0.0

    def observe(self, report: InferenceReport) -> None:
        """Fold in one report."""
        elapsed_s = max(0.0, report.time_s - self.last_s) if self.last_s else 0.0
        self.last_s = report.time_s
        self.prompt_tokens = FORGET * self.prompt_tokens + report.prefill_tokens
        self.prefill_s = FORGET * self.prefill_s + report.prefill_s
        self.output_tokens = FORGET * self.output_tokens + report.output_tokens
        self.finished = FORGET * self.finished + report.finished
        self.elapsed_s = FORGET * self.elapsed_s + elapsed_s
        self.queue = DECAY * self.queue + (1 - DECAY) * report.queue

    @property
    def known(self) -> bool:
        """Whether requests have finished lately."""
        return self.finished >= 1

    @property
    def mean_prompt_tokens(self) -> float:
        """Of a request."""
        return self.prompt_tokens / self.finished if self.known else 0.0

    @property
    def mean_output_tokens(self) -> float:
        """L, of a request."""
        return max(1.0, self.output_tokens / self.finished) if self.known else 1.0

    @property
    def prefill_s_per_token(self) -> float:
        """Seconds a prompt token takes."""
        return self.prefill_s / self.prompt_tokens if self.prompt_tokens > 0 else 0.0

    @property
    def queue_s(self) -> float:
        """What a request waits in the engine, by Little's law."""
        rate = self.finished / self.elapsed_s if self.elapsed_s > 0 else 0.0
        return self.queue / rate if rate > 0 else 0.0


@dataclass
class ReplicaModel:
    """Bounded: two grids and a few sums. `version` grows with every sample, so that nothing is fitted twice."""

    infer: Grid = field(default_factory=Grid)
    train: Grid = field(default_factory=Grid)
    traffic: Traffic = field(default_factory=Traffic)
    latency: LatencyModel | None = None
    first_batch: int = 0
    noise_scale: float = 0.0
    running: int | None = None
    version: int = 0
    fitted: tuple[bool, int] = (False, -1)

    def observe_inference(self, report: InferenceReport) -> None:
        """One report of the inference process."""
        for iteration in report.iterations:
            self.infer.add(iteration.sizes, iteration.mean_s, iteration.count)
            self.version += 1
        self.running = max(1, round(report.mean_batch))
        self.traffic.observe(report)

    def observe_training(self, report: TrainReport) -> None:
        """One optimiser step. b is the batch that ran beside it, if that is known: the report has only its limit."""
        infer = report.sizes.infer if self.running is None else self.running
        self.train.add(BatchSizes(report.sizes.train, infer), report.step_s)
        self.first_batch = self.first_batch or report.sizes.train
        if report.noise_scale is not None and math.isfinite(report.noise_scale):
            self.noise_scale = max(0.0, report.noise_scale)
        self.version += 1

    def refit(self, combined: bool, peers: Collection[ReplicaModel]) -> Refusal | None:
        """Fit the samples of the state it is in; a refusal leaves the last accepted model.

        `peers` are replicas of the same model, this one among them: they tell what its own samples cannot.
        """
        if self.fitted == (combined, self.version):
            return None
        self.fitted = (combined, self.version)
        before = self.latency
        known = (before.infer, before.train) if before else (None, None)
        own = self.infer.points(lambda sizes: combined or sizes.train == 0)
        infer = _fit(own, lambda: pooled(peer.infer for peer in peers), known[0])
        if isinstance(infer, Refusal):
            return infer
        train = _fit(self.train.points(), lambda: pooled(peer.train for peer in peers), known[1])
        if isinstance(train, Refusal):
            train = known[1] or proportional(self.train.points())
        traffic = self.traffic
        self.latency = LatencyModel(
            infer,
            train if isinstance(train, Line) else None,
            traffic.prefill_s_per_token,
            traffic.mean_output_tokens if traffic.known or before is None else before.output_tokens,
        )
        return None


def _fit(own: list[Point], peers: Callable[[], list[Point]], before: Line | None) -> Line | Refusal:
    """From its own points; slopes they cannot tell come from the points of all, or else from the fit before."""
    if not own:
        return Refusal("nothing was measured")
    line = fit(own, before)
    if isinstance(line, Line) and line.sequence_identified and line.train_identified:
        return line
    shared = fit(peers(), before)
    if isinstance(shared, Refusal):
        return line
    refined = fit(own, shared)
    return shared if isinstance(refined, Refusal) else refined
