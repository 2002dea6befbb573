"""What a slot takes, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch

from collm_common.errors import AdapterError
from collm_replica import weights
from collm_replica.engine.decoder import Decoder
from collm_replica.engine.operators import Operators
from collm_replica.engine.slots import SlotBank
from collm_replica.models import skeleton
from tests.engine.conftest import Folders
from tests.engine.harness import load
from tests.support.models import random_adapter

Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def decoder(folders: Folders) -> Decoder:
    return Decoder(load(folders("llama")), Operators(), slots=2, max_rank=4, context_tokens=16)


@pytest.fixture
def bank(decoder: Decoder) -> SlotBank:
    return SlotBank(decoder.places, max_rank=4)


def written(decoder: Decoder) -> int:
    """How many slot numbers are not zero."""
    groups = {place.group for place in decoder.places.values()}
    return sum(int(torch.count_nonzero(part)) for group in groups for part in (group.a, group.b))


def refuse(bank: SlotBank, tensors: dict[str, torch.Tensor], rank: int, match: str) -> None:
    with pytest.raises(AdapterError, match=match):
        bank.stage(tensors, rank, 8.0)


def test_unfit_adapters_are_refused_by_name_and_write_nothing(
    folders: Folders, decoder: Decoder, bank: SlotBank
) -> None:
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
    assert written(decoder) == 0


def test_a_cleared_slot_is_zero_and_its_neighbour_untouched(folders: Folders, decoder: Decoder, bank: SlotBank) -> None:
    """Catches an old version that shines through, and a clear that hits the wrong columns."""
    bank.load(0, bank.stage(random_adapter(folders("llama"), 4, 8.0, seed=1), 4, 8.0))
    alone = written(decoder)
    bank.load(1, bank.stage(random_adapter(folders("llama"), 2, 8.0, ["q_proj"], seed=2), 2, 8.0))
    bank.clear(1)
    assert written(decoder) == alone
    bank.clear(0)
    assert written(decoder) == 0


def test_a_smaller_adapter_leaves_nothing_of_the_one_before(folders: Folders, decoder: Decoder, bank: SlotBank) -> None:
    """Catches rank 4 rows and modules that stay when rank 2 on one module follows."""
    small = random_adapter(folders("llama"), 2, 8.0, ["q_proj"], seed=2)
    bank.load(0, bank.stage(small, 2, 8.0))
    alone = written(decoder)
    bank.load(0, bank.stage(random_adapter(folders("llama"), 4, 8.0, seed=1), 4, 8.0))
    bank.load(0, bank.stage(small, 2, 8.0))
    assert written(decoder) == alone


def test_half_precision_tensors_are_taken(folders: Folders, decoder: Decoder, bank: SlotBank) -> None:
    """Catches a bank that only takes its own dtype."""
    tensors = random_adapter(folders("llama"), 4, 8.0)
    bank.load(0, bank.stage({name: tensor.bfloat16() for name, tensor in tensors.items()}, 4, 8.0))
    assert written(decoder) > 0


@torch.inference_mode()
def test_banks_behind_the_weights_are_used_where_they_are(folders: Folders) -> None:
    """Catches a layout whose room is not where the engine looks for it: adapters would cost a second product."""
    folder = folders("qwen2")
    manifest = weights.plan(folder, torch.float32, bank_rows=2 * 4)
    flat = torch.zeros(manifest.size, dtype=torch.uint8)
    views, banks = weights.views(flat, manifest), weights.banks(flat, manifest)
    for name, tensor in load(folder).state_dict().items():
        views[name].copy_(tensor)
    model = weights.assemble(skeleton(folder, torch.float32), views)
    decoder = Decoder(model, Operators(), slots=2, max_rank=4, context_tokens=16, banks=banks)
    bank = SlotBank(decoder.places, 4)
    bank.load(1, bank.stage(random_adapter(folder, 4, 8.0), 4, 8.0))
    for group in {place.group for place in decoder.places.values()}:
        assert group.wide is not None
        assert group.weight.data_ptr() == group.linears[0].weight.data_ptr()
        rows = torch.cat((group.weight, group.a.flatten(0, 2)))
        assert torch.equal(group.wide, rows)
        assert group.a[1].count_nonzero() > 0
