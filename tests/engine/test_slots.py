"""What a slot takes, and what it leaves behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collm_common.errors import AdapterError
from collm_replica.engine.slots import SlotBank
from tests.engine.conftest import Folders
from tests.engine.harness import load
from tests.support.models import random_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def model(folders: Folders) -> Any:
    return load(folders("llama"))


@pytest.fixture
def bank(model: Any) -> SlotBank:
    return SlotBank(model, model.model.layers, slots=2, max_rank=4)


def written(model: Any) -> int:
    """How many slot numbers are not zero."""
    linears = [module for module in model.modules() if hasattr(module, "a")]
    return sum(int(torch.count_nonzero(part)) for linear in linears for part in (linear.a, linear.b))


def refuse(bank: SlotBank, tensors: dict[str, torch.Tensor], rank: int, match: str) -> None:
    with pytest.raises(AdapterError, match=match):
        bank.load(0, tensors, rank, 8.0)


def test_unfit_adapters_are_refused_by_name_and_write_nothing(folders: Folders, model: Any, bank: SlotBank) -> None:
    """Catches an adapter that is silently ignored, half loaded, or poisons every batch."""
    good = random_adapter(folders("llama"), 4, 8.0)
    a, b = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
    refuse(bank, {}, 4, "no tensors")
    refuse(bank, random_adapter(folders("llama"), 5, 8.0), 5, "rank 5 is not in 1..4")
    refuse(bank, good, 3, "shape .*, not")
    refuse(
        bank, good | {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 64)}, 4, "lm_head.*belongs to no linear"
    )
    refuse(bank, good | {f"{Q}.weight": torch.ones(64, 64)}, 4, f"{Q}.weight belongs")
    refuse(bank, {name: tensor for name, tensor in good.items() if name != b}, 4, f"{b} is missing")
    refuse(bank, {name: tensor for name, tensor in good.items() if name != a}, 4, f"{a} is missing")
    refuse(bank, good | {a: torch.full_like(good[a], float("nan"))}, 4, f"{a} has values that are not finite")
    refuse(bank, good | {b: torch.full_like(good[b], float("inf"))}, 4, f"{b} has values that are not finite")
    refuse(bank, good | {a: good[a].long()}, 4, f"{a} has values that are not finite")
    assert written(model) == 0


def test_a_cleared_slot_is_zero_and_its_neighbour_untouched(folders: Folders, model: Any, bank: SlotBank) -> None:
    """Catches an old version that shines through, and a clear that hits the wrong columns."""
    bank.load(0, random_adapter(folders("llama"), 4, 8.0, seed=1), 4, 8.0)
    alone = written(model)
    bank.load(1, random_adapter(folders("llama"), 2, 8.0, ["q_proj"], seed=2), 2, 8.0)
    bank.clear(1)
    assert written(model) == alone
    bank.clear(0)
    assert written(model) == 0


def test_a_smaller_adapter_leaves_nothing_of_the_one_before(folders: Folders, model: Any, bank: SlotBank) -> None:
    """Catches rank 4 rows and modules that stay when rank 2 on one module follows."""
    small = random_adapter(folders("llama"), 2, 8.0, ["q_proj"], seed=2)
    bank.load(0, small, 2, 8.0)
    alone = written(model)
    bank.load(0, random_adapter(folders("llama"), 4, 8.0, seed=1), 4, 8.0)
    bank.load(0, small, 2, 8.0)
    assert written(model) == alone


def test_half_precision_tensors_are_taken(folders: Folders, model: Any, bank: SlotBank) -> None:
    """Catches a bank that only takes its own dtype."""
    tensors = random_adapter(folders("llama"), 4, 8.0)
    bank.load(0, {name: tensor.bfloat16() for name, tensor in tensors.items()}, 4, 8.0)
    assert written(model) > 0
