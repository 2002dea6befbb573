"""(B*, b*) = argmax over B of goodput(B, b*(B)), with b*(B) the largest b that keeps the SLO (paper section 5.3).

The SM share of the trainer is one more knob: each share has a latency model of its own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec import Struct

from collm_common.latency import LatencyModel
from collm_common.types import BatchSizes, Slo
from collm_coordinator.goodput import goodput


class Demand(Struct, frozen=True):
    """What requests look like and may take. `queue_s` is what they wait before they run.

    `rate` (1/s) is the share of the load that the replica must carry.
    """

    slo: Slo
    prompt_tokens: float = 0.0
    queue_s: float = 0.0
    rate: float = 0.0


class Learning(Struct, frozen=True):
    """What training tells: M0 = first_batch * accumulation, noise scale in samples, l in nats a step."""

    first_batch: int = 1
    accumulation: int = 1
    noise_scale: float = 0.0
    loss_fall: float = 1.0


class Choice(Struct, frozen=True):
    """The sizes; `feasible` is false where not even one sequence beside the smallest B keeps the SLO.

    `rate` is how many requests a second it carries.
    """

    sizes: BatchSizes
    goodput: float
    feasible: bool
    rate: float = 0.0


def keeps_slo(model: LatencyModel, sizes: BatchSizes, demand: Demand) -> bool:
    """S(B, b) <= tau' = SLO - queueing latency, T_infer <= TPOT, and wait + prefill + one iteration <= TTFT."""
    slo, iteration_s = demand.slo, model.iteration_s(sizes.train, sizes.infer)
    if slo.e2e_s is not None:
        service_s = model.service_s(sizes.train, sizes.infer, demand.prompt_tokens)
        if demand.queue_s + service_s > slo.e2e_s:
            return False
    if slo.tpot_s is not None and iteration_s > slo.tpot_s:
        return False
    first_s = demand.queue_s + model.prefill_s(demand.prompt_tokens) + iteration_s
    return slo.ttft_s is None or first_s <= slo.ttft_s


def largest_infer_batch(model: LatencyModel, train_batch: int, infer_max: int, demand: Demand) -> int:
    """b*(B); 0 if not even one sequence keeps the SLO. Durations do not fall with b, so halving finds it."""
    low, high = 0, infer_max
    while low < high:
        middle = (low + high + 1) // 2
        if keeps_slo(model, BatchSizes(train_batch, middle), demand):
            low = middle
        else:
            high = middle - 1
    return low


def carried(model: LatencyModel, sizes: BatchSizes, demand: Demand) -> float:
    """lambda = b / S(B, b), requests a second, by Little's law; endless where nothing takes time."""
    service_s = model.service_s(sizes.train, sizes.infer, demand.prompt_tokens)
    return sizes.infer / service_s if service_s > 0 else float("inf")


def choices(
    model: LatencyModel, train_batches: Sequence[int], infer_max: int, demand: Demand, learning: Learning
) -> list[Choice]:
    """One for each B beside which the SLO can be kept, with b*(B)."""
    found: list[Choice] = []
    for train_batch in train_batches:
        infer_batch = largest_infer_batch(model, train_batch, infer_max, demand)
        micro_step_s = model.micro_step_s(train_batch, infer_batch)
        if infer_batch < 1 or micro_step_s is None or micro_step_s <= 0:
            continue
        sizes = BatchSizes(train_batch, infer_batch, model.sm_share)
        value = goodput(
            train_batch,
            learning.first_batch,
            learning.accumulation,
            micro_step_s,
            learning.noise_scale,
            learning.loss_fall,
        )
        found.append(Choice(sizes, value, feasible=True, rate=carried(model, sizes, demand)))
    return found


def best(found: Sequence[Choice], infer_min: int, rate: float) -> Choice:
    """The highest goodput among those that carry `rate` with a b of at least `infer_min`, ties to the larger b.

    Where none does: the one that carries most.
    """
    enough = [choice for choice in found if choice.sizes.infer >= infer_min and choice.rate >= rate]
    if enough:
        return max(enough, key=lambda choice: (choice.goodput, choice.sizes.infer, choice.sizes.train))
    return max(found, key=lambda choice: (choice.sizes.infer, choice.rate, choice.goodput))


def solve(
    model: LatencyModel,
    train_batches: Sequence[int],
    infer_max: int,
    demand: Demand,
    learning: Learning,
    infer_min: int = 1,
) -> Choice:
    """The best pair over `train_batches`. `infer_min` and `demand.rate` are the share of the load it must carry.

    Where that cannot be kept: the B that leaves the largest b. Where nothing is feasible: the smallest B, b = 1.
    """
    return solve_shares([model], train_batches, infer_max, demand, learning, infer_min)


def solve_shares(
    models: Sequence[LatencyModel],
    train_batches: Sequence[int],
    infer_max: int,
    demand: Demand,
    learning: Learning,
    infer_min: int = 1,
) -> Choice:
    """`solve` over the SM shares too: `models` has one law for each share that the trainer can be given."""
    found = [choice for model in models for choice in choices(model, train_batches, infer_max, demand, learning)]
    if found:
        return best(found, infer_min, demand.rate)
    smallest = BatchSizes(min(train_batches), 1, min(model.sm_share for model in models))
    return Choice(smallest, 0.0, feasible=False)


def first_draw(seed: str, train_max: int, infer_max: int) -> BatchSizes:
    """A small B0 and a fairly large b0 at random, different on every replica: the spread identifies the fit."""
    draw = random.Random(seed)
    train = draw.randint(1, max(1, train_max // 2))
    return BatchSizes(train, draw.randint(max(1, infer_max // 2), infer_max))
