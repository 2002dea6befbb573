"""When a client has learnt what the global model can teach it (paper section 4: its own loss falls no further)."""

from __future__ import annotations

from collections.abc import Sequence


def should_stop(losses: Sequence[float], patience: int, min_fall: float) -> bool:
    """Whether the last `patience` rounds all failed to bring the loss below the best before them by `min_fall` (share).

    `losses` are one client's mean training losses, oldest first. A patience of 0 never stops.
    """
    if patience < 1 or len(losses) <= patience:
        return False
    best_before = min(losses[:-patience])
    return min(losses[-patience:]) > best_before * (1 - min_fall)
