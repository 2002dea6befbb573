"""What a cell's replicas did over time: activity, memory, states, a sample a bin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from collm_common.types import ReplicaState
from collm_tools.simulator.replica import Replica

WEIGHTS_GIB, GPU_GIB = 15.0, 141.0
KV_GIB_PER_SEQUENCE = 1366 * 131072 / 2**30
"""131,072 bytes a token (8B model, grouped queries, bf16), 1,366 tokens an average conversation of the Azure trace."""
TRAINER_GIB = (0.6, 0.5)
"""Base, and by B: measured peaks of 2.6 GiB at B = 4 and 8.6 GiB at 16, beyond the shared weights."""


def memory_gib(running: int, train: int) -> float:
    """What a replica's GPU holds."""
    trainer = TRAINER_GIB[0] + TRAINER_GIB[1] * train if train else 0.0
    return WEIGHTS_GIB + KV_GIB_PER_SEQUENCE * running + trainer


@dataclass
class Timeline:
    """Samples at the ends of bins; means over the replicas, `served` is in-flight batch by replica."""

    replicas: Sequence[Replica]
    activity: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    combined: list[int] = field(default_factory=list)
    idle: list[int] = field(default_factory=list)
    running: list[list[int]] = field(default_factory=list)
    spread: list[float] = field(default_factory=list)
    _before: list[float] = field(default_factory=list)
    _last_s: float = 0.0

    def __call__(self, now: float) -> None:
        """A bin is over."""
        for replica in self.replicas:
            replica.advance(now)
        before = self._before or [0.0] * len(self.replicas)
        after = [replica.activity_s for replica in self.replicas]
        shares = [(b - a) / (now - self._last_s) for a, b in zip(before, after, strict=True)]
        self._before, self._last_s = after, now
        self.activity.append(fmean(shares))
        self.spread.append(max(shares) - min(shares))
        self.memory.append(fmean(memory_gib(r.running, r.training) for r in self.replicas) / GPU_GIB)
        self.combined.append(sum(r.state is ReplicaState.COMBINED for r in self.replicas))
        self.idle.append(sum(r.state is ReplicaState.IDLE for r in self.replicas))
        self.running.append([replica.running for replica in self.replicas])
