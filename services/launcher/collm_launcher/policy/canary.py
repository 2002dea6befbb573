"""What requests say of a candidate that serves some of them, before all get it."""

from __future__ import annotations

from collections.abc import Iterable

from collm_common.messages import Scored
from collm_common.types import AdapterRef, Quality
from collm_launcher.policy.job import Job, Phase, Rules, Trial


def hear(job: Job, scored: Iterable[Scored]) -> None:
    """Count the references that a replica scored, while a candidate of this job is in service somewhere."""
    if job.phase is not Phase.CANARY:
        return
    own = [one for one in scored if one.adapter.name == job.adapter]
    candidate = AdapterRef(job.adapter, str(job.candidate))
    for_, against = job.trial.candidate, job.trial.others
    job.trial = Trial(
        Quality.pooled([for_, *(one.quality for one in own if one.adapter == candidate)]) or for_,
        Quality.pooled([against, *(one.quality for one in own if one.adapter != candidate)]) or against,
    )


def regression(trial: Trial, rules: Rules) -> str | None:
    """Why the candidate must not be published; None if nothing speaks against it, or too little was scored to tell.

    It must be worse by more than `canary_slack`: the two were asked different questions.
    """
    new, old = trial.candidate, trial.others
    if min(new.tokens, old.tokens) < rules.canary_tokens or new.cross_entropy <= old.cross_entropy * (
        1 + rules.canary_slack
    ):
        return None
    counts = f"over {new.tokens} and {old.tokens} tokens"
    return f"{new.cross_entropy:.4f} where the others have {old.cross_entropy:.4f}, {counts}"
