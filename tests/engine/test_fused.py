"""Triton kernels against the reference operators: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from collm_replica.engine.attention import Decodes, KvCache, Packed
from collm_replica.engine.decoder import Decoder
from collm_replica.engine.groups import Selection
from collm_replica.engine.operators import Inputs, Operators
from collm_replica.engine.slots import SlotBank
from tests.engine.conftest import Folders
from tests.engine.harness import load
from tests.support.models import FAMILIES, random_adapter

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(
        not (torch.cuda.is_available() or INTERPRETED), reason="needs a CUDA device or TRITON_INTERPRET=1"
    ),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
TOKENS, BLOCK, CONTEXT = 5, 4, 64
POSITIONS = [0, 3, 17, 40, 63]


def decoder(folders: Folders, family: str, operators: Operators, **overrides: Any) -> Decoder:
    """With adapters in slots 0 and 2."""
    folder = folders(family, head_dim=32, **overrides) if family != "qwen2" else folders(family, hidden_size=128)
    made = Decoder(load(folder).to(DEVICE, DTYPE), operators, slots=3, max_rank=8, context_tokens=CONTEXT)
    bank = SlotBank(made.places, 8)
    bank.load(0, bank.stage(random_adapter(folder, 8, 16.0, seed=1), 8, 16.0))
    bank.load(2, bank.stage(random_adapter(folder, 3, 4.0, ["q_proj", "v_proj", "up_proj", "o_proj"], seed=2), 3, 4.0))
    return made


def inputs(made: Decoder, adapters: bool) -> Inputs:
    """Five decoding sequences over pages of random keys and values, and a sixth token that only fills the batch."""
    layer = made.layers[0]
    generator = torch.Generator().manual_seed(0)
    blocks = CONTEXT // BLOCK
    cache = KvCache(len(made.layers), 1 + TOKENS * blocks, BLOCK, layer.kv_heads, layer.head_dim, DTYPE, DEVICE)
    for pages in (*cache.keys, *cache.values):
        pages.copy_(torch.randn(pages.shape, generator=generator))
    tables = torch.randperm(TOKENS * blocks, generator=generator).view(TOKENS, blocks) + 1
    positions = torch.tensor(POSITIONS)
    places = tables[torch.arange(TOKENS), positions // BLOCK] * BLOCK + positions % BLOCK
    slots = torch.tensor([0, -1, 2, 1, 0], dtype=torch.int32, device=DEVICE)
    selection = Selection(slots, 0, 2, DTYPE) if adapters else None
    decodes = Decodes(tables.to(DEVICE), positions.to(DEVICE), BLOCK, DTYPE)
    ids = torch.randint(0, 256, (TOKENS,), generator=generator).to(DEVICE)
    return Inputs(ids, positions.to(DEVICE), None, selection, Packed(cache, places.to(DEVICE), decodes, []))


def assert_close(got: Tensor, wanted: Tensor) -> None:
    error = (got.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < (1e-5 if INTERPRETED else 2e-2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("splits", [1, 132])
@torch.inference_mode()
def test_a_decode_step_is_that_of_the_reference(folders: Folders, family: str, adapters: bool, splits: int) -> None:
    """Catches a wrong slot, head, page, rotation, norm or split, and keys that are stored elsewhere."""
    from collm_replica.engine.fused import FusedOperators

    reference = decoder(folders, family, Operators())
    fused = decoder(folders, family, FusedOperators(splits))
    wanted, got = inputs(reference, adapters), inputs(fused, adapters)
    assert_close(fused.forward(got), reference.forward(wanted))
    for pages in ("keys", "values"):
        for one, other in zip(getattr(got.packed.cache, pages), getattr(wanted.packed.cache, pages), strict=True):
            assert_close(one, other)


@torch.inference_mode()
def test_windows_and_tokens_that_only_fill_a_batch(folders: Folders) -> None:
    """Catches a window that is off by one, and a filler that writes over another sequence's keys."""
    from collm_replica.engine.fused import FusedOperators

    window = {"sliding_window": 7}
    reference = decoder(folders, "mistral", Operators(), **window)
    fused = decoder(folders, "mistral", FusedOperators(132), **window)
    wanted, got = inputs(reference, True), inputs(fused, True)
    packed = got.packed
    assert packed.places is not None
    assert packed.decodes is not None
    more = {
        "ids": torch.cat((got.ids, got.ids[:1])),
        "positions": torch.cat((got.positions, got.positions[:1])),
        "slots": torch.cat((got.selection.slots, got.selection.slots[:1])) if got.selection else got.ids,
    }
    tables = torch.cat((packed.decodes.tables, packed.decodes.tables[-1:]))
    filled = Inputs(
        more["ids"],
        more["positions"],
        None,
        Selection(more["slots"], 0, 2, DTYPE),
        Packed(
            packed.cache,
            torch.cat((packed.places, packed.places.new_tensor([-1]))),
            Decodes(tables, more["positions"], BLOCK, DTYPE),
            [],
        ),
    )
    assert_close(fused.forward(filled)[:TOKENS], reference.forward(wanted))
    assert packed.cache is not None
    assert wanted.packed.cache is not None
    for one, other in zip(packed.cache.keys, wanted.packed.cache.keys, strict=True):
        assert_close(one, other)
