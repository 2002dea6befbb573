"""From the clients' adapters to one: refuse what does not fit, combine the rest, say how exact the result is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from msgspec import Struct

from collm_common.errors import AdapterError
from collm_common.messages import ServerRates
from collm_common.types import Strategy
from collm_replica.finetune import lowrank
from collm_replica.finetune.lowrank import Tensors
from collm_replica.finetune.screening import Bounds, Update, screen
from collm_replica.finetune.strategies import STRATEGIES, terms_of


class Plan(Struct, frozen=True):
    """How to combine: the result's `rank`, and the `scale` alpha / rank that all must share, as it is in no factor.

    No client was asked for more than `steps`.
    """

    strategy: Strategy
    rank: int
    scale: float
    steps: float
    rates: ServerRates = ServerRates()


class Aggregate(Struct, frozen=True):
    """`residual`: how far the result's products are from the mean product, relative Frobenius norm over all layers.

    `state` is what the strategy wants back as it goes on from this result; `refused` maps clients to the reason.
    """

    tensors: dict[str, torch.Tensor]
    residual: float
    state: dict[str, torch.Tensor]
    refused: Mapping[str, str]


def aggregate(
    plan: Plan, start: Tensors, updates: Sequence[Update], state: Tensors, refused: Mapping[str, str]
) -> Aggregate:
    """Combine what the clients made of `start`, beside those that are `refused` already.

    Raises AdapterError, which names every client, if no update can be used.
    """
    screened = screen(updates, start, Bounds(plan.rank, plan.scale, plan.steps, plan.strategy != "product"))
    refused = {**refused, **screened.refused}
    if not screened.accepted:
        why = "; ".join(f"{client}: {reason}" for client, reason in sorted(refused.items()))
        raise AdapterError(f"no update can be used: {why or 'there is none'}")
    made = STRATEGIES[plan.strategy](start, screened.accepted, plan.rank, plan.rates, state)
    return Aggregate(made.tensors, _residual(start, screened.accepted, made.tensors), made.state, refused)


def _residual(start: Tensors, updates: Sequence[Update], made: Tensors) -> float:
    lost = norm = 0.0
    for layer in lowrank.layers(start):
        terms = terms_of(layer, start, updates)
        norm += lowrank.square(terms)
        lost += lowrank.square([*terms, (-1.0, lowrank.factors(made, layer))])
    return float((lost / norm) ** 0.5) if norm > 0 else 0.0
