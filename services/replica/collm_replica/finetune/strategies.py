"""What the server does with the clients' adapters, by name.

factor averages (equal ranks), x all of A and B, delta = mean_k x_k - x:
    fedavg   x + delta                                                        (paper section 4)
    fedprox  the same; its clients hold on to x by a proximal term            (Li et al. 2020)
    fedavgm  m <- beta m + delta, x + eta m                                   (Hsu et al. 2019)
    fedadam  m <- beta m + (1 - beta) delta, v <- beta2 v + (1 - beta2) delta^2,
             x + eta m / (sqrt(v) + tau)                                      (Reddi et al. 2021)
product      the mean of B_k A_k, projected to the rank; any ranks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec import Struct

from collm_common.messages import ServerRates
from collm_common.types import Strategy
from collm_replica.finetune import lowrank
from collm_replica.finetune.lowrank import Tensors
from collm_replica.finetune.screening import Update

MOMENTUM = ServerRates(learning_rate=1.0, momentum=0.3)
"""With 0.9 as over hundreds of rounds, the few rounds of a job would go ten times too far."""
ADAM = ServerRates(learning_rate=0.01, momentum=0.9)
MAX_STEP_RATIO = 4.0


class Combined(Struct, frozen=True):
    """The new adapter, and what the server remembers until the round after it was accepted."""

    tensors: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


def coefficients(updates: Sequence[Update]) -> list[float]:
    """How much of each client's change counts: its share of the samples, evened out for its optimiser steps.

    p_k tau / tau_k with tau = sum p_k tau_k, so that a client which made fewer steps is not drowned (FedNova, Wang et
    al. 2020); at most MAX_STEP_RATIO p_k, as few steps are noisy ones.
    """
    total = sum(update.samples for update in updates)
    shares = [update.samples / total for update in updates]
    mean_steps = sum(share * update.steps for share, update in zip(shares, updates, strict=True))
    return [
        share * min(MAX_STEP_RATIO, mean_steps / update.steps) for share, update in zip(shares, updates, strict=True)
    ]


def terms_of(layer: str, start: Tensors, updates: Sequence[Update]) -> list[tuple[float, lowrank.Factors]]:
    """The mean product as a sum: start + sum c_k (client - start)."""
    counted = coefficients(updates)
    rest = 1.0 - sum(counted)
    terms = [(c, lowrank.factors(update.tensors, layer)) for c, update in zip(counted, updates, strict=True)]
    return terms if abs(rest) < lowrank.NEGLIGIBLE else [*terms, (rest, lowrank.factors(start, layer))]


def product(start: Tensors, updates: Sequence[Update], rank: int, rates: ServerRates, state: Tensors) -> Combined:
    """The projection of the mean product; nothing is remembered."""
    made: dict[str, torch.Tensor] = {}
    for layer in lowrank.layers(start):
        made[layer + lowrank.A], made[layer + lowrank.B] = lowrank.project(terms_of(layer, start, updates), rank)
    return Combined(made, {})


def average(start: Tensors, updates: Sequence[Update], rank: int, rates: ServerRates, state: Tensors) -> Combined:
    """Means of A and of B apart: off from the mean product by their covariance across clients."""
    return Combined({name: start[name].float() + change for name, change in _delta(start, updates).items()}, {})


def momentum(start: Tensors, updates: Sequence[Update], rank: int, rates: ServerRates, state: Tensors) -> Combined:
    """Plain averaging as a step of gradient descent with momentum."""
    rate, beta = _rates(rates, MOMENTUM)
    made, kept = {}, {}
    for name, change in _delta(start, updates).items():
        kept[name] = beta * state.get(name, torch.zeros_like(change)) + change
        made[name] = start[name].float() + rate * kept[name]
    return Combined(made, kept)


def adam(start: Tensors, updates: Sequence[Update], rank: int, rates: ServerRates, state: Tensors) -> Combined:
    """Plain averaging as a step of Adam; as in its paper, without correction of the first steps' bias."""
    rate, beta = _rates(rates, ADAM)
    made, kept = {}, {}
    for name, change in _delta(start, updates).items():
        zero = torch.zeros_like(change)
        first = beta * state.get(f"m.{name}", zero) + (1 - beta) * change
        second = rates.beta2 * state.get(f"v.{name}", zero) + (1 - rates.beta2) * change**2
        kept[f"m.{name}"], kept[f"v.{name}"] = first, second
        made[name] = start[name].float() + rate * first / (second.sqrt() + rates.tau)
    return Combined(made, kept)


def _rates(said: ServerRates, usual: ServerRates) -> tuple[float, float]:
    """(learning rate, momentum)."""
    rate = usual.learning_rate if said.learning_rate is None else said.learning_rate
    beta = usual.momentum if said.momentum is None else said.momentum
    assert rate is not None
    assert beta is not None
    return rate, beta


def _delta(start: Tensors, updates: Sequence[Update]) -> dict[str, torch.Tensor]:
    counted = coefficients(updates)
    return {
        name: sum(
            (c * (update.tensors[name].float() - old.float()) for c, update in zip(counted, updates, strict=True)),
            torch.zeros_like(old, dtype=torch.float32),
        )
        for name, old in start.items()
    }


Combine = Callable[[Tensors, Sequence[Update], int, ServerRates, Tensors], Combined]
STRATEGIES: Mapping[Strategy, Combine] = {
    "fedavg": average,
    "fedprox": average,
    "fedavgm": momentum,
    "fedadam": adam,
    "product": product,
}
