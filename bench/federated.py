"""Federated LoRA on real, unlike data against centralised and local training with the same samples and steps.

    python bench/federated.py --data ../shared/data --out docs/results/federated.md

Everything runs through the trainer and the aggregation that replicas run; only the broker between them is left out.
Held-out loss is the cross-entropy of all clients' held-out answers together, weighted by token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec import Struct

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.small_model import teach
from bench.texts import CLIENTS, read
from collm_common.messages import Hyperparams, ServerRates, TrainRound
from collm_common.types import BatchSizes, Strategy
from collm_replica.finetune.aggregation import Plan, aggregate
from collm_replica.finetune.lowrank import Tensors
from collm_replica.finetune.samples import Dataset, build
from collm_replica.finetune.screening import Update
from collm_replica.finetune.trainer import Trainer

BATCH, RANK = 8, 8
HYPER = Hyperparams(
    rank=RANK, alpha=16.0, learning_rate=8e-3, base_samples=BATCH, warmup_steps=4, max_tokens=256, heldout_samples=32
)


class Variant(Struct, frozen=True):
    """One way to train. `ranks` and `shares` of a round's steps are by client."""

    name: str
    strategy: Strategy
    ranks: tuple[int, ...] = (RANK,) * len(CLIENTS)
    shares: tuple[float, ...] = (1.0,) * len(CLIENTS)
    proximal: float = 0.0
    rates: ServerRates = ServerRates()


class Course(Struct):
    """Held-out loss before the first and after every round, and the residual of every aggregation."""

    losses: list[float]
    residuals: list[float] = []


VARIANTS = (
    Variant("product", "product"),
    Variant("product, ranks 8 4 2", "product", ranks=(8, 4, 2)),
    Variant("product, steps 1 1/2 1/4", "product", shares=(1.0, 0.5, 0.25)),
    Variant("FedAvg of A and B", "fedavg"),
    Variant("FedProx, mu 0.01", "fedprox", proximal=0.01),
    Variant("FedAvgM", "fedavgm"),
    Variant("FedAdam", "fedadam"),
)


class School:
    """One trainer that plays every client in turn: a round leaves nothing behind but its tensors."""

    def __init__(self, trainer: Trainer, sets: Mapping[str, Dataset], rounds: int, steps: int, seed: int) -> None:
        self.trainer, self.sets, self.rounds, self.steps, self.seed = trainer, sets, rounds, steps, seed
        heldout = tuple(chain.from_iterable(data.heldout for data in sets.values()))
        self.everything = Dataset(tuple(chain.from_iterable(data.train for data in sets.values())), heldout)

    def measure(self, tensors: Tensors | None) -> float:
        """Held-out loss on everybody's samples."""
        self.trainer.data = self.everything
        return self.trainer.evaluate_stored(tensors, HYPER).cross_entropy

    def train(
        self, data: Dataset, start: Tensors | None, hyper: Hyperparams, number: int, steps: int, batch: int = BATCH
    ) -> Tensors:
        """One round of one client."""
        self.trainer.data = data
        task = TrainRound(
            job="bench",
            round=number,
            adapter="bench",
            start=0,
            sizes=BatchSizes(batch, 1),
            steps=steps,
            first_step=(number - 1) * self.steps,
            total_steps=self.rounds * self.steps,
            hyper=hyper,
            seed=self.seed,
            deadline_s=float("inf"),
        )
        self.trainer.start_round(task, start)
        while not self.trainer.done:
            self.trainer.micro_step()
        return self.trainer.tensors()

    def federated(self, variant: Variant) -> Course:
        """Rounds of all clients from one adapter, with an aggregation after each."""
        course = Course([self.measure(None)])
        state: Tensors = {}
        plan = Plan(variant.strategy, RANK, HYPER.alpha / RANK, self.steps, variant.rates)
        current: Tensors = self.trainer.fresh(HYPER, self.seed)
        for number in range(1, self.rounds + 1):
            updates = []
            for name, rank, share in zip(CLIENTS, variant.ranks, variant.shares, strict=True):
                hyper = msgspec.structs.replace(HYPER.at_rank(rank), proximal=variant.proximal)
                steps = max(1, round(share * self.steps))
                tensors = self.train(self.sets[name], current, hyper, number, steps)
                updates.append(Update(name, tensors, BATCH * steps, steps, hyper.alpha / hyper.rank))
            made = aggregate(plan, current, updates, state, {})
            assert not made.refused, made.refused
            current, state = made.tensors, made.state
            course.losses.append(self.measure(current))
            course.residuals.append(made.residual)
        return course

    def centralised(self, rate: float) -> Course:
        """One learner that has all data, with as many steps of as many samples as all clients together."""
        course, current = Course([self.measure(None)]), None
        batch = BATCH * len(CLIENTS)
        hyper = msgspec.structs.replace(HYPER, learning_rate=HYPER.learning_rate * rate, base_samples=batch)
        for number in range(1, self.rounds + 1):
            current = self.train(self.everything, current, hyper, number, self.steps, batch)
            course.losses.append(self.measure(current))
        return course

    def alone(self) -> Course:
        """Every client by itself: the mean of their losses on everybody's samples."""
        ends: dict[str, Tensors | None] = dict.fromkeys(CLIENTS)
        course = Course([self.measure(None)])
        for number in range(1, self.rounds + 1):
            for name in CLIENTS:
                ends[name] = self.train(self.sets[name], ends[name], HYPER, number, self.steps)
            course.losses.append(fmean(self.measure(tensors) for tensors in ends.values()))
        return course


def mean(courses: Sequence[Course]) -> Course:
    """Round by round, over seeds."""
    losses = [fmean(values) for values in zip(*(course.losses for course in courses), strict=True)]
    return Course(losses, [fmean(values) for values in zip(*(course.residuals for course in courses), strict=True)])


def row(name: str, course: Course, central: float) -> str:
    """One line of the table."""
    losses = " | ".join(f"{loss:.3f}" for loss in course.losses)
    residuals = " ".join(f"{residual:.3f}" for residual in course.residuals) or "-"
    return f"| {name} | {losses} | {100 * (course.losses[-1] / central - 1):+.1f} % | {residuals} |"


def main() -> None:
    """Train every variant with every seed; print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", type=Path, default=Path(".cache/bench-small-model"), help="made if it is not there")
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="", help="variants whose name begins so")
    options = parser.parse_args()
    texts = read(options.data)
    questions = [record.messages[0][1] for records in texts.values() for record in records]
    model, tokenizer = teach(questions, options.base_steps, options.model)
    sets = {name: build(texts[name], tokenizer, HYPER.max_tokens, HYPER.heldout_samples) for name in CLIENTS}
    print({name: (len(data.train), len(data.heldout), data.too_long) for name, data in sets.items()}, flush=True)

    trainer = Trainer(model, tokenizer)
    schools = [School(trainer, sets, options.rounds, options.steps, seed) for seed in range(options.seeds)]
    courses: dict[str, Course] = {}
    for rate in (1.0, 1.7):
        courses[f"centralised, rate x{rate:g}"] = mean([school.centralised(rate) for school in schools])
        print(courses, flush=True)
    central = min(course.losses[-1] for course in courses.values())
    for variant in VARIANTS:
        if variant.name.startswith(options.only):
            started = time.monotonic()
            courses[variant.name] = mean([school.federated(variant) for school in schools])
            print(row(variant.name, courses[variant.name], central), f"{time.monotonic() - started:.0f} s", flush=True)
    courses["every client alone"] = mean([school.alone() for school in schools])
    heads = " | ".join(["start", *(f"round {number}" for number in range(1, options.rounds + 1))])
    table = [f"| | {heads} | against centralised | residuals |", "|---" * (options.rounds + 4) + "|"]
    table += [row(name, course, central) for name, course in courses.items()]
    print("\n".join(table))
    if options.out:
        options.out.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main()
