"""What the inference process measures about itself between two reports, and where utilisation comes from."""

from __future__ import annotations

import logging
import resource
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

from collm_common.messages import Answered, Iteration, Scored, Served
from collm_common.types import AdapterRef, BatchSizes, Quality, Slo

log = logging.getLogger(__name__)


class Utilisation(Protocol):
    """How much work the device did since the last call, and the memory in use."""

    def read(self, busy_fraction: float) -> float:
        """In 0..1; `busy_fraction` is the share of time the engine was stepping."""

    def memory_bytes(self) -> int:
        """Device memory in use; on a CPU, resident memory of this process."""


class CpuUtilisation:
    """On a CPU the engine's busy fraction is the work done."""

    def read(self, busy_fraction: float) -> float:
        """The fraction itself."""
        return busy_fraction

    def memory_bytes(self) -> int:
        """Peak resident set of this process."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


class GpmUtilisation:
    """SM activity between two calls by NVML's GPU performance monitoring; raises pynvml.NVMLError if unsupported."""

    def __init__(self, index: int) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByIndex(index)
        if not pynvml.nvmlGpmQueryDeviceSupport(self._device).isSupportedDevice:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
        pynvml.nvmlGpmSampleGet(self._device, self._samples[0])

    def read(self, busy_fraction: float) -> float:
        """SM activity since the last call; the busy fraction does not enter."""
        nvml, (before, after) = self._nvml, self._samples
        nvml.nvmlGpmSampleGet(self._device, after)
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = 1
        query.sample1, query.sample2 = before, after
        query.metrics[0].metricId = nvml.NVML_GPM_METRIC_SM_UTIL
        nvml.nvmlGpmMetricsGet(query)
        self._samples = [after, before]
        return min(1.0, max(0.0, float(query.metrics[0].value) / 100.0))

    def memory_bytes(self) -> int:
        """Memory in use on the device, by all processes."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._device).used)


class BusyGpuUtilisation:
    """A GPU without GPM: busy fraction times an occupancy measured once, which NVML's own utilisation cannot tell."""

    def __init__(self, occupancy: float, index: int) -> None:
        import torch

        self._occupancy, self._torch, self._index = occupancy, torch, index

    def read(self, busy_fraction: float) -> float:
        """Busy fraction weighted by occupancy."""
        return busy_fraction * self._occupancy

    def memory_bytes(self) -> int:
        """Device memory in use."""
        free, total = self._torch.cuda.mem_get_info(self._index)
        return int(total - free)


LEAST_BUSY, SMOOTHING = 0.1, 0.3
GPU_DECODE_OCCUPANCY = 0.6
"""SM activity of back-to-back decode steps of 64 sequences of an 8B model on an H200, measured by GPM."""


class OwnWork:
    """The inference process's part of the work: counters of the device tell it neither from its trainer's nor from
    that of other replicas on the same device.

    It is never more than the busy fraction. How much work a busy second is, it learns while nothing is trained; beside
    training it is at most that much.
    """

    def __init__(self, source: Utilisation) -> None:
        self._source, self._work_per_busy = source, 1.0

    def read(self, busy_fraction: float, beside_training: bool) -> float:
        """In 0..1, since the last call."""
        work = min(self._source.read(busy_fraction), busy_fraction)
        if beside_training:
            return min(work, busy_fraction * self._work_per_busy)
        if busy_fraction >= LEAST_BUSY:
            self._work_per_busy += SMOOTHING * (work / busy_fraction - self._work_per_busy)
        return work


def utilisation_of(device: str) -> Utilisation:
    """The best source this device has."""
    if device == "cpu":
        return CpuUtilisation()
    import pynvml

    try:
        return GpmUtilisation(0)
    except pynvml.NVMLError as error:
        log.warning("no GPM on this GPU (%s): utilisation is the busy fraction times %g", error, GPU_DECODE_OCCUPANCY)
        return BusyGpuUtilisation(GPU_DECODE_OCCUPANCY, 0)


@dataclass
class Window:
    """Sums over one reporting interval that began at `start_s` (monotonic)."""

    start_s: float
    busy_s: float = 0.0
    sequence_s: float = 0.0
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    output_tokens: int = 0
    finished: int = 0
    iterations: dict[BatchSizes, list[float]] = field(default_factory=lambda: defaultdict(list))
    served: dict[Slo, tuple[int, float]] = field(default_factory=dict)
    answered: list[Answered] = field(default_factory=list)
    scored: dict[AdapterRef, list[Quality]] = field(default_factory=lambda: defaultdict(list))

    def step(self, sizes: BatchSizes, running: int, prefill_tokens: int, duration_s: float) -> None:
        """Account for one engine iteration at `sizes`. One with a prefill in it says nothing about decode time."""
        self.busy_s += duration_s
        self.sequence_s += running * duration_s
        if prefill_tokens:
            self.prefill_tokens += prefill_tokens
            self.prefill_s += duration_s
        elif running and duration_s > 0:
            self.iterations[sizes].append(duration_s)

    def admit(self, slo: Slo, waited_s: float) -> None:
        """Account for a request that came in `waited_s` after its arrival."""
        count, total_s = self.served.get(slo, (0, 0.0))
        self.served[slo] = count + 1, total_s + max(0.0, waited_s)

    def admitted(self) -> tuple[Served, ...]:
        """What came in, by objective."""
        return tuple(Served(slo, count, total_s) for slo, (count, total_s) in self.served.items())

    def score(self, adapter: AdapterRef, quality: Quality) -> None:
        """Account for a reference that was scored."""
        self.scored[adapter].append(quality)

    def scores(self) -> tuple[Scored, ...]:
        """Mean over the reference tokens of each adapter version."""
        return tuple(Scored(adapter, mean) for adapter, all_ in self.scored.items() if (mean := Quality.pooled(all_)))

    def samples(self) -> tuple[Iteration, ...]:
        """Mean decode iteration time at each sizes seen."""
        return tuple(Iteration(sizes, len(times), sum(times) / len(times)) for sizes, times in self.iterations.items())

    def fractions(self, now_s: float) -> tuple[float, float]:
        """(busy fraction, time-averaged running sequences)."""
        # A step that began before the window is accounted for here as a whole.
        elapsed_s = max(1e-9, now_s - self.start_s, self.busy_s)
        return self.busy_s / elapsed_s, self.sequence_s / elapsed_s
