"""Whether a request can still be in time, by what is known of the replicas of its model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from collm_common.messages import Request
from collm_dispatcher.cell import Member
from collm_dispatcher.policy.pacing import latest_s, least_s


def latest_start_s(request: Request, members: Iterable[Member]) -> float | None:
    """When the fastest usable replica must begin with it (Unix seconds).

    None when nobody can tell: a usable replica has no fit, or the answer has begun already.
    """
    usable = [member for member in members if member.usable]
    if not usable or request.prefix or any(member.latency is None for member in usable):
        return None
    seconds = min(_alone_s(request, member) for member in usable)
    return latest_s(request.arrival_s, request.deadline_s, seconds)


def _alone_s(request: Request, member: Member) -> float:
    model = member.latency
    assert model is not None
    step, prefill_s = partial(model.iteration_s, member.train_batch), model.prefill_s(len(request.prompt))
    return least_s(step, prefill_s, model.output_tokens, request.sampling.max_tokens, request.slo)
