"""What one replica's requests look like, and how long they wait."""

from __future__ import annotations

from dataclasses import dataclass

from collm_common.messages import InferenceReport

MEMORY_S = 20.0
QUEUE_MEMORY_S = 5.0


def faded(elapsed_s: float, memory_s: float) -> float:
    """What is left of an old sum after `elapsed_s`: half of it after about 0.7 `memory_s`."""
    return memory_s / (memory_s + max(0.0, elapsed_s))


@dataclass
class Traffic:
    """Sums over recent reports, older ones fading; rates are per second."""

    prompt_tokens: float = 0.0
    prefill_s: float = 0.0
    output_tokens: float = 0.0
    finished: float = 0.0
    elapsed_s: float = 0.0
    admitted: float = 0.0
    waited_s: float = 0.0
    queue: float = 0.0
    last_s: float = 0.0

    def observe(self, report: InferenceReport) -> None:
        """Fold in one report."""
        elapsed_s = max(0.0, report.time_s - self.last_s) if self.last_s else 0.0
        self.last_s = report.time_s
        keep = faded(elapsed_s, MEMORY_S)
        self.prompt_tokens = keep * self.prompt_tokens + report.prefill_tokens
        self.prefill_s = keep * self.prefill_s + report.prefill_s
        self.output_tokens = keep * self.output_tokens + report.output_tokens
        self.finished = keep * self.finished + report.finished
        self.elapsed_s = keep * self.elapsed_s + elapsed_s
        self.admitted = keep * self.admitted + sum(served.requests for served in report.served)
        self.waited_s = keep * self.waited_s + sum(served.waited_s for served in report.served)
        keep = faded(elapsed_s, QUEUE_MEMORY_S)
        self.queue = keep * self.queue + (1 - keep) * report.queue

    @property
    def known(self) -> bool:
        """Whether requests have finished lately."""
        return self.finished >= 1

    @property
    def rate(self) -> float:
        """Requests that finish in a second."""
        return self.finished / self.elapsed_s if self.elapsed_s > 0 else 0.0

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
        """Queueing latency: from the arrival to this replica, and by Little's law in its engine."""
        before_s = self.waited_s / self.admitted if self.admitted > 0 else 0.0
        return before_s + (self.queue / self.rate if self.rate > 0 else 0.0)
