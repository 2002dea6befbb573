"""What a finished round was worth: the gate, the clients' scores, and who has learnt enough (paper section 4)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from collm_common.types import Quality, ReplicaState
from collm_launcher.policy.early_stop import should_stop
from collm_launcher.policy.job import Action, Job, Return, Score

QUALITY_BOUNDS = (0.1, 10.0)


def compare(before: Mapping[str, Quality], after: Mapping[str, Quality]) -> tuple[float | None, float | None]:
    """Token-weighted mean cross-entropies over the clients that measured both; None where there are none."""
    both = sorted(before.keys() & after.keys())
    old, new = (Quality.pooled(measured[id_] for id_ in both) for measured in (before, after))
    return old.cross_entropy if old else None, new.cross_entropy if new else None


def passes(before: float, after: float) -> bool:
    """Whether a candidate may be published: its loss is a number, and not worse than of what it would replace."""
    return math.isfinite(after) and after <= before


def score(job: Job, before: float | None) -> list[Action]:
    """Q <- Q F(t-1) / F(t), F(t) the mean training loss of round t.

    F(0) is `before`, the held-out loss of where the job started; without it the first round scores nobody.
    """
    loss = sum(job.uploads.values()) / len(job.uploads)
    before = before if job.last_loss is None else job.last_loss
    job.last_loss = loss
    if before is None or not math.isfinite(before) or loss <= 0:
        return []
    actions: list[Action] = []
    for id_ in sorted(job.uploads.keys() & job.clients.keys()):
        client = job.clients[id_]
        client.quality = min(QUALITY_BOUNDS[1], max(QUALITY_BOUNDS[0], client.quality * before / loss))
        actions.append(Score(id_, client.quality))
    return actions


def stop_early(job: Job) -> list[Action]:
    """Clients whose own loss falls no further leave; if the server does, the best of the rest takes over."""
    actions: list[Action] = []
    for id_, loss in job.uploads.items():
        if (client := job.clients.get(id_)) is None:
            continue
        client.losses.append(loss)
        if should_stop(client.losses, job.rules.patience, job.rules.min_fall):
            del job.clients[id_]
            actions.append(Return(id_, ReplicaState.COMBINED, f"its loss stays at {loss:.4f}"))
    if job.clients and job.server not in job.clients:
        job.server = min(job.clients, key=lambda id_: (-job.clients[id_].quality, id_))
    return actions
