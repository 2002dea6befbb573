"""From what is known of the replicas of one model to batch sizes. Pure: no clock, no broker."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
from msgspec import Struct

from collm_common.latency import LatencyModel
from collm_common.types import BatchSizes, ReplicaState, Slo
from collm_coordinator.objectives import queue_that_counts
from collm_coordinator.probing import Cell, Probe, next_probe
from collm_coordinator.replica_model import ReplicaModel
from collm_coordinator.samples import Point, beside, pooled
from collm_coordinator.solver import (
    Choice,
    Demand,
    Learning,
    carried,
    choices,
    first_draw,
    keeps_slo,
    largest_infer_batch,
    solve_shares,
)
from collm_coordinator.split import split


class Rules(Struct, frozen=True):
    """`slo` is kept in addition to what the requests ask for; b is at least `min_infer_share` of the engine's limit.

    `headroom` is spare capacity (fraction), and a backlog is to be gone in `drain_s`.
    """

    slo: Slo
    max_train_batch: int = 8
    min_infer_share: float = 0.25
    headroom: float = 0.2
    drain_s: float = 2.0


class Member(Struct, frozen=True):
    """A replica as the choice sees it; `accumulation` is of its job."""

    id: str
    state: ReplicaState
    infer_max: int
    model: ReplicaModel
    accumulation: int = 1


def demand_on(model: ReplicaModel, law: LatencyModel, rules: Rules, rate: float = 0.0) -> Demand:
    """What its requests are and may take, under the tightest objective that it serves and could keep."""
    prompt_tokens = model.traffic.mean_prompt_tokens

    def feasible(slo: Slo) -> bool:
        return keeps_slo(law, BatchSizes(0, 1), Demand(slo, prompt_tokens))

    slo = model.objectives.binding(rules.slo, feasible)
    return Demand(slo, prompt_tokens, queue_that_counts(slo, model.traffic.queue_s), rate)


def choose(member: Member, law: LatencyModel, rules: Rules, rate: float, within_round: bool = False) -> Choice:
    """B, b and SM share for one replica that trains, which must carry `rate`. `law` holds at its present share.

    Within a round the share stays: another one takes another process.
    """
    batches = member.model.progress.fitting(range(1, rules.max_train_batch + 1))
    floor = max(1, round(rules.min_infer_share * member.infer_max))
    demand = demand_on(member.model, law, rules, rate)
    laws = [law] if within_round else _laws(member.model, law)
    return solve_shares(laws, batches, member.infer_max, demand, _learning(member), floor)


def first_sizes(seed: str, member: Member, rules: Rules, rate: float, draw_max: int, number: int = 0) -> BatchSizes:
    """Sizes for client `number` of a job that starts: the best ones where an earlier job has told the laws.

    Else a draw with B of about `draw_max`; each client takes another one of the SM shares, so that all are measured.
    """
    model = member.model
    laws = [model.laws.get(share) for share in model.shares or (model.share,)]
    told = [law for law in laws if law is not None and law.train is not None and law.infer.train_identified]
    if len(told) == len(laws):
        return choose(member, told[0], rules, rate).sizes
    drawn = first_draw(seed, draw_max, member.infer_max)
    share = sorted(model.shares)[number % len(model.shares)] if model.shares else model.share
    return msgspec.structs.replace(drawn, sm_share=share)


def rate_to_carry(id_: str, members: Collection[Member], backlog: int, rules: Rules) -> float:
    """What a Combined replica must carry (1/s): its part of the load that the Serving ones leave over.

    0 while it is not known what they can carry.
    """
    wanted = sum(member.model.traffic.rate for member in members) * (1 + rules.headroom) + backlog / rules.drain_s
    options: dict[str, list[Choice]] = {}
    for member in members:
        law = member.model.latency
        if member.state is ReplicaState.IDLE:
            continue
        if law is None:
            return 0.0
        if member.state is ReplicaState.SERVING:
            wanted -= _serving_rate(member, law, rules)
        else:
            options[member.id] = _options(member, law, rules)
    return split(options, wanted).get(id_, 0.0) if wanted > 0 else 0.0


def probe(model: ReplicaModel, peers: Sequence[ReplicaModel], asked: Collection[Cell], rules: Rules) -> Probe | None:
    """The next B to train with for the sake of the fit; None once its effect is told.

    b cannot be asked for, requests decide it: the plan is made for the b that ran beside training on average. Until a
    law says what a batch costs, B at most doubles.
    """
    points = _by_train(pooled((peer.infer for peer in peers), beside(model.share)))
    if not points:
        return None
    law = model.laws.get(model.share)
    told = law is not None and law.infer.train_identified
    most = rules.max_train_batch if told else min(rules.max_train_batch, 2 * max(point.train for point in points))
    trains = model.progress.fitting(1 << power for power in range(most.bit_length()))
    if law is not None:
        demand = demand_on(model, law, rules)
        trains = [train for train in trains if largest_infer_batch(law, train, 1, demand)] or trains[:1]
    return next_probe(points, trains, [points[0].infer], asked)


def slowed(law: LatencyModel, ratio: float) -> LatencyModel:
    """The law if iterations beside training take `ratio` times as long as it says."""
    return msgspec.structs.replace(law, infer=law.infer.scaled(ratio))


def _laws(model: ReplicaModel, law: LatencyModel) -> list[LatencyModel]:
    """Of the shares that the trainer can be given; the present one alone where it has no choice."""
    others: Mapping[float, LatencyModel] = {**model.laws, law.sm_share: law}
    offered = [others[share] for share in model.shares if share in others and others[share].train is not None]
    return offered or [law]


def _learning(member: Member, loss_fall: float = 1.0) -> Learning:
    progress = member.model.progress
    return Learning(max(1, progress.first_batch), member.accumulation, progress.noise_scale, loss_fall)


def _options(member: Member, law: LatencyModel, rules: Rules) -> list[Choice]:
    """What it could run, its goodput weighted by the fall of its loss."""
    progress = member.model.progress
    batches = progress.fitting(range(1, rules.max_train_batch + 1))
    learning = _learning(member, 1.0 if progress.loss_fall is None else progress.loss_fall)
    demand = demand_on(member.model, law, rules)
    laws = _laws(member.model, law)
    return [choice for one in laws for choice in choices(one, batches, member.infer_max, demand, learning)]


def _serving_rate(member: Member, law: LatencyModel, rules: Rules) -> float:
    demand = demand_on(member.model, law, rules)
    b = largest_infer_batch(law, 0, member.infer_max, demand)
    return carried(law, BatchSizes(0, max(1, b)), demand)


def _by_train(points: Sequence[Point]) -> list[Point]:
    """One point for each B, all at the mean b."""
    if not points:
        return []
    total = sum(point.count for point in points)
    infer = max(1, round(sum(point.infer * point.count for point in points) / total))
    merged: list[Point] = []
    for train in sorted({point.train for point in points}):
        own = [point for point in points if point.train == train]
        count = sum(point.count for point in own)
        merged.append(Point(train, infer, sum(point.seconds * point.count for point in own) / count, count))
    return merged
