"""Which updates a round is made of: a client's that is damaged, foreign or wild is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median_low

from msgspec import Struct

from collm_common.errors import AdapterError
from collm_common.types import AtLeastOne, Name
from collm_replica.finetune import lowrank
from collm_replica.finetune.lowrank import Tensors

NORM_LIMIT = 10.0
"""How much longer than the median client's an update may be, by optimiser step."""
WEIGHT_LIMIT = 64.0
"""How many times the median client's samples one may claim, by optimiser step: batch sizes differ, but not so far."""


class Update(Struct, frozen=True):
    """What one client trained in a round: `samples` weigh it, `steps` are its optimiser steps, `scale` alpha / rank."""

    client: Name
    tensors: Tensors
    samples: AtLeastOne
    steps: AtLeastOne
    scale: float


class Bounds(Struct, frozen=True):
    """What every update of a round must keep: `rank` is the largest allowed, or the only one; `steps` the most."""

    rank: int
    scale: float
    steps: float
    equal_ranks: bool


class Screened(Struct, frozen=True):
    """`refused` maps clients to the reason."""

    accepted: tuple[Update, ...]
    refused: Mapping[str, str]


def screen(updates: Sequence[Update], start: Tensors, bounds: Bounds) -> Screened:
    """Updates that fit the round's `start` and each other."""
    refused: dict[str, str] = {}
    for update in updates:
        try:
            _check(update, start, bounds)
        except AdapterError as error:
            refused[update.client] = str(error)
    fit = [update for update in updates if update.client not in refused]
    lengths = {update.client: _length(update, start) / update.steps for update in fit}
    weights = {update.client: update.samples / update.steps for update in fit}
    # The low median: of two clients the quieter one is believed.
    longest = NORM_LIMIT * median_low(lengths.values()) if lengths else 0.0
    heaviest = WEIGHT_LIMIT * median_low(weights.values()) if weights else 0.0
    for client, length in lengths.items():
        if not math.isfinite(length) or length > longest > 0:
            refused[client] = f"its change a step has norm {length:.3g}, over the limit of {longest:.3g}"
        elif weights[client] > heaviest:
            refused[client] = f"it claims {weights[client]:.3g} samples a step, over the limit of {heaviest:.3g}"
    return Screened(tuple(update for update in fit if update.client not in refused), refused)


def _check(update: Update, start: Tensors, bounds: Bounds) -> None:
    """Raises AdapterError."""
    if not math.isclose(update.scale, bounds.scale, rel_tol=1e-6):
        raise AdapterError(f"alpha / rank is {update.scale:g}, must be {bounds.scale:g}")
    if update.steps > bounds.steps:
        raise AdapterError(f"it claims {update.steps} steps, {bounds.steps:g} were asked for")
    if odd := set(update.tensors) ^ set(start):
        raise AdapterError(f"{min(odd)} is missing, or no tensor of this adapter")
    for layer in lowrank.layers(start):
        (a, b), (own_a, own_b) = lowrank.factors(update.tensors, layer), lowrank.factors(start, layer)
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            raise AdapterError(f"{layer}: A {tuple(a.shape)} and B {tuple(b.shape)} do not fit each other")
        if (b.shape[0], a.shape[1]) != (own_b.shape[0], own_a.shape[1]):
            shapes = f"[{b.shape[0]}, {a.shape[1]}], must be [{own_b.shape[0]}, {own_a.shape[1]}]"
            raise AdapterError(f"{layer}: the product of B and A is {shapes}")
        if not (bounds.rank if bounds.equal_ranks else 1) <= a.shape[0] <= bounds.rank:
            allowed = f"{'' if bounds.equal_ranks else 'at most '}{bounds.rank}"
            raise AdapterError(f"{layer} has rank {a.shape[0]}, must be {allowed}")
        if not (a.isfinite().all() and b.isfinite().all()):
            raise AdapterError(f"{layer} has values that are not finite")


def _length(update: Update, start: Tensors) -> float:
    """Frobenius norm of the change of all products together."""
    total = 0.0
    for layer in lowrank.layers(start):
        mine, old = lowrank.factors(update.tensors, layer), lowrank.factors(start, layer)
        total += lowrank.square([(1.0, mine), (-1.0, old)])
    return math.sqrt(total)
