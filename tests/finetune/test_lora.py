"""Injected adapters against PEFT's own saving and loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, PreTrainedModel

from collm_replica.finetune.lora import Lora
from collm_replica.finetune.loss import precision
from tests.support.models import FAMILIES, VOCAB, random_adapter, tiny_model_folder

IDS = torch.arange(12)[None] % VOCAB


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp(request.param), request.param)


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=IDS).logits
    return result


def test_peft_saves_the_same_and_loads_it_to_the_same_model(folder: Path, tmp_path: Path) -> None:
    """Tensors that no other tool can load, or another scale than alpha / rank."""
    lora = Lora(plain(folder), rank=4, alpha=8.0)
    lora.load(random_adapter(folder, 4, 8.0))
    saved = get_peft_model_state_dict(lora.model)
    own = lora.tensors()
    assert own.keys() == saved.keys()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in own.items())
    lora.model.save_pretrained(tmp_path)
    assert torch.allclose(logits(PeftModel.from_pretrained(plain(folder), tmp_path)), logits(lora.model), atol=1e-5)


def test_only_float32_adapters_of_all_linears_are_trained_on_a_frozen_base(folder: Path) -> None:
    """A base weight that gets a gradient, or adapters in bfloat16 whose small steps round to nothing."""
    lora = Lora(plain(folder, torch.bfloat16), rank=4, alpha=8.0)
    trained = {name for name, parameter in lora.model.named_parameters() if parameter.requires_grad}
    assert len(trained) == len(lora.parameters) == 2 * 7 * 2
    assert all("lora_" in name for name in trained)
    assert {parameter.dtype for parameter in lora.parameters} == {torch.float32}
    with precision(lora.model):
        loss = lora.model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    assert {parameter.grad.dtype for parameter in lora.parameters if parameter.grad is not None} == {torch.float32}
    assert {name for name, parameter in lora.model.named_parameters() if parameter.grad is not None} == trained


def test_fresh_weights_depend_on_the_seed_alone_and_change_nothing(folder: Path) -> None:
    """Clients that begin apart because their global random state or their dtype differs."""
    model = plain(folder)
    base = logits(model)
    torch.manual_seed(1)
    one = Lora(model, rank=4, alpha=8.0)
    torch.manual_seed(2)
    two = Lora(plain(folder, torch.bfloat16), rank=4, alpha=8.0)
    for lora in (one, two):
        lora.load(lora.fresh(7))
    assert all(torch.equal(tensor, two.tensors()[name]) for name, tensor in one.tensors().items())
    assert torch.equal(logits(one.model), base)
    a = torch.cat([tensor.flatten() for name, tensor in one.tensors().items() if "q_proj.lora_A" in name])
    assert float(a.abs().max()) <= 64**-0.5
    assert float(a.std()) == pytest.approx((3 * 64) ** -0.5, rel=0.1)


def test_detaching_leaves_the_plain_model(folder: Path) -> None:
    """Layers of an earlier job that stay around the weights."""
    model = plain(folder)
    base, names = logits(model), [name for name, _ in model.named_parameters()]
    lora = Lora(model, rank=4, alpha=8.0)
    lora.load(random_adapter(folder, 4, 8.0))
    assert not torch.allclose(logits(lora.model), base)
    detached = lora.detach()
    assert torch.equal(logits(detached), base)
    assert [name for name, _ in detached.named_parameters()] == names
