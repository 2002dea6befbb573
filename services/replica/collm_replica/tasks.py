"""A job's tasks as both sides of the fine-tuning process name them; no torch."""

from __future__ import annotations

from collm_common import messages
from collm_common.messages import Aggregate, Evaluate, TaskFailed, TrainRound

Task = TrainRound | Aggregate | Evaluate
MAX_REASON = 500


def failed(task: Task, replica: str, reason: str, now: float) -> TaskFailed:
    """The event that tells the job not to wait for `task`; a long reason is cut."""
    return TaskFailed(
        job=task.job,
        round=task.round,
        replica=replica,
        task=messages.kind(task),
        reason=reason[:MAX_REASON],
        time_s=now,
    )
