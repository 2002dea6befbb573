"""One bad client among three: refused by name, and the others are combined as if it had not been there."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest
import torch

from collm_replica.finetune.aggregation import Plan, aggregate
from collm_replica.finetune.screening import Bounds, Update, screen
from tests.finetune.adapters import adapter, fresh, update

Q_A, Q_B = "l0.q_proj.lora_A.weight", "l0.q_proj.lora_B.weight"
GOOD = (update(1), update(2))


def changed(change: Callable[[dict[str, torch.Tensor]], object], **fields: object) -> Update:
    tensors = adapter(3)
    change(tensors)
    return msgspec.structs.replace(update(3), tensors=tensors, **fields)


def scaled(factor: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            tensors[name] = tensors[name] * factor

    return change


def bounds(equal_ranks: bool) -> Bounds:
    return Bounds(4, 2.0, 50, equal_ranks)


POISON = {
    "nan": (changed(lambda t: t[Q_B].fill_(float("nan"))), "l0.q_proj has values that are not finite"),
    "infinite": (changed(lambda t: t[Q_A].fill_(float("inf"))), "not finite"),
    "huge": (changed(scaled(30.0)), "norm"),
    "over every number": (changed(scaled(1e30)), "norm"),
    "missing": (changed(lambda t: t.pop(Q_B)), "l0.q_proj.lora_B.weight is missing"),
    "foreign": (changed(lambda t: t.update({"l7.x.lora_A.weight": torch.ones(4, 2)})), "no tensor of this adapter"),
    "transposed": (changed(lambda t: t.update({Q_A: t[Q_A].T, Q_B: t[Q_B].T})), "do not fit"),
    "another shape": (changed(lambda t: t.update({Q_A: torch.ones(4, 99)})), r"\[24, 99\], must be \[24, 16\]"),
    "flat": (changed(lambda t: t.update({Q_A: torch.ones(64)})), "do not fit"),
    "too high a rank": (msgspec.structs.replace(update(3), tensors=adapter(3, 8)), "rank 8, must be .*4"),
    "rank zero": (msgspec.structs.replace(update(3), tensors=adapter(3, 0)), "rank 0"),
    "more steps than asked": (changed(scaled(30.0), steps=5000), "claims 5000 steps, 50 were asked"),
    "all the weight": (msgspec.structs.replace(update(3), samples=10**15), "samples a step"),
    "another scale": (msgspec.structs.replace(update(3), scale=4.0), "alpha / rank is 4, must be 2"),
}


@pytest.mark.parametrize("strategy", ["fedavg", "product"])
@pytest.mark.parametrize("kind", POISON)
def test_a_poisoned_update_is_refused_by_name_and_changes_nothing(kind: str, strategy: str) -> None:
    """One client that ends everybody's round, or that becomes everybody's adapter."""
    poison, why = POISON[kind]
    plan = msgspec.convert({"strategy": strategy, "rank": 4, "scale": 2.0, "steps": 50}, Plan)
    result = aggregate(plan, fresh(4), [GOOD[0], poison, GOOD[1]], {}, {})
    assert list(result.refused) == ["c3"]
    assert re.search(why, result.refused["c3"])
    clean = aggregate(plan, fresh(4), GOOD, {}, {})
    assert all(torch.equal(tensor, clean.tensors[name]) for name, tensor in result.tensors.items())


def test_a_lower_rank_is_welcome_only_where_products_are_combined() -> None:
    """An average of factors of different ranks, or a small client that is turned away for nothing."""
    small = update(3, rank=2)
    assert screen([*GOOD, small], fresh(4), bounds(equal_ranks=False)).refused == {}
    refused = screen([*GOOD, small], fresh(4), bounds(equal_ranks=True)).refused
    assert refused == {"c3": "l0.q_proj has rank 2, must be 4"}


def test_many_steps_are_no_reason_to_refuse() -> None:
    """A fast client that is taken for a poisoned one because it went further than the others."""
    start = adapter(7)
    far = {name: old + 40 * (update(3).tensors[name] - old) * 0.02 for name, old in start.items()}
    near = [
        msgspec.structs.replace(
            one, tensors={name: old + (one.tensors[name] - old) * 0.02 for name, old in start.items()}, steps=1
        )
        for one in GOOD
    ]
    fast = Update("c3", far, 8, 40, 2.0)
    assert screen([*near, fast], start, bounds(equal_ranks=True)).refused == {}
    hasty = msgspec.structs.replace(fast, steps=1)
    assert set(screen([*near, hasty], start, bounds(equal_ranks=True)).refused) == {"c3"}


def test_clients_that_changed_nothing_are_no_reason_to_refuse_the_others() -> None:
    """A limit of zero that everyone who learnt something is over."""
    still = [Update(f"s{n}", fresh(4), 8, 5, 2.0) for n in range(2)]
    assert screen([*still, GOOD[0]], fresh(4), bounds(equal_ranks=True)).refused == {}
