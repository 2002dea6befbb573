"""Work: ingress -> dispatch loop -> replica, and the room that comes back."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from collm_common.messages.base import Message, RequestId, Tokens
from collm_common.types import AtLeastOne, Count, Name, SamplingParams, Slo

Tenant = Annotated[str, Meta(max_length=128)]


class Request(Message, frozen=True, kw_only=True, tag="request"):
    """One request on its way. `prefix` are tokens its client has already seen: the answer continues after them.

    `adapter` is "" for the base model; `version` pins it, None takes what is current at admission.
    `tenant` is whose it is, for fairness. `reference` tokens are scored (never sampled) under the same
    adapter version once the answer is complete. `traceparent` is W3C's, of the span that appended it; "" for none.
    """

    id: RequestId
    attempt: Count = 0
    ingress: Name
    model: Name
    adapter: str = ""
    version: str | None = None
    prompt: Annotated[Tokens, Meta(min_length=1)]
    prefix: Tokens = ()
    reference: Tokens = ()
    sampling: SamplingParams
    slo: Slo
    tenant: Tenant = ""
    arrival_s: float
    deadline_s: float
    traceparent: Annotated[str, Meta(max_length=128)] = ""


class Freed(Message, frozen=True, kw_only=True, tag="freed"):
    """A replica is through with so many requests: there is room for others."""

    replica: Name
    requests: AtLeastOne
