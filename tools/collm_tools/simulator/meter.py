"""What a simulated replica measures about itself between two reports, as a real one does."""

from __future__ import annotations

from dataclasses import dataclass, field

from collm_common.messages import InferenceReport, Iteration
from collm_common.types import BatchSizes, ReplicaState


@dataclass
class Meter:
    """Sums since `start_s`, all in seconds of virtual time but the counts.

    `activity_s` integrates SM activity, `decode_s` maps (B, b) to (seconds, iterations) without a prefill in them.
    """

    start_s: float = 0.0
    activity_s: float = 0.0
    busy_s: float = 0.0
    sequence_s: float = 0.0
    prefill_s: float = 0.0
    prefill_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    decode_s: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def decoded(self, train: int, running: int, seconds: float, iterations: float) -> None:
        """`running` sequences went on for a while beside a training batch `train`."""
        row = self.decode_s.get((train, running))
        if row is None:
            self.decode_s[train, running] = [seconds, iterations]
        else:
            row[0] += seconds
            row[1] += iterations

    def report(
        self, replica: str, state: ReplicaState, now: float, queue: int, limit: int, train: int
    ) -> InferenceReport:
        """The telemetry message of this interval; iterations that were not whole do not count."""
        elapsed = max(1e-9, now - self.start_s)
        return InferenceReport(
            replica=replica,
            state=state,
            time_s=now,
            utilisation=min(1.0, self.activity_s / elapsed),
            memory_bytes=0,
            queue=queue,
            running=0,
            mean_batch=self.sequence_s / elapsed,
            limit=limit,
            train_batch=train,
            iterations=tuple(
                Iteration(BatchSizes(sizes[0], sizes[1]), int(count), seconds / count)
                for sizes, (seconds, count) in self.decode_s.items()
                if count >= 1 and sizes[1] > 0
            ),
            prefill_tokens=self.prefill_tokens,
            prefill_s=self.prefill_s,
            output_tokens=self.output_tokens,
            finished=self.finished,
        )
