"""Samples that share a row learn exactly what they learn alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from collm_replica.finetune.loss import answer_loss, quality
from collm_replica.finetune.samples import IGNORED, Sample, collate
from tests.support.models import EOS_ID, FAMILIES, VOCAB, tiny_model_folder

CPU = torch.device("cpu")
LENGTHS = ((9, 4), (3, 2), (1, 3), (5, 5), (2, 1), (1, 1))


def sample(prompt: int, answer: int, seed: int = 0) -> Sample:
    drawn = torch.randint(0, VOCAB, (prompt + answer,), generator=torch.Generator().manual_seed(seed)).tolist()
    return Sample(tuple(drawn[:prompt]), (*drawn[prompt:-1], EOS_ID))


SAMPLES = [sample(prompt, answer, seed) for seed, (prompt, answer) in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=[family for family in FAMILIES if family != "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_model_folder(tmp_path_factory.mktemp(request.param), request.param)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def gradient(model: Any, pack: bool) -> tuple[float, int, list[torch.Tensor]]:
    model.zero_grad()
    total, tokens = answer_loss(model, collate(SAMPLES, EOS_ID, pack), CPU)
    torch.autograd.backward(total)
    return float(total.detach()), tokens, [parameter.grad.clone() for parameter in model.parameters()]


def test_packing_changes_neither_loss_nor_gradient(model: Any) -> None:
    """A sample that sees its neighbour in the row, stands at the wrong position, or is predicted by another's end."""
    loss, tokens, plain = gradient(model, pack=False)
    packed_loss, packed_tokens, packed = gradient(model, pack=True)
    assert packed_tokens == tokens
    assert packed_loss == pytest.approx(loss, rel=1e-5)
    for one, other in zip(plain, packed, strict=True):
        assert torch.allclose(one, other, atol=1e-4 * float(one.abs().max()) + 1e-6)


def test_a_measurement_is_the_same_packed(model: Any) -> None:
    """A gate that judges versions by how samples happened to lie."""
    plain, packed = (quality(model, SAMPLES, EOS_ID, CPU, pack) for pack in (False, True))
    assert packed.tokens == plain.tokens
    assert packed.cross_entropy == pytest.approx(plain.cross_entropy, rel=1e-5)


def test_short_samples_fill_the_rows_of_long_ones() -> None:
    """Rows that are mostly padding."""
    batch = collate(SAMPLES, EOS_ID, pack=True)
    assert batch.ids.shape == (3, 13)
    assert batch.mask.shape == (3, 1, 13, 13)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=12))
def test_every_sample_is_in_exactly_one_row(lengths: list[tuple[int, int]]) -> None:
    """A sample lost, doubled or cut by packing, or a position that sees nothing, whose attention is not a number."""
    samples = [sample(prompt, answer, seed) for seed, (prompt, answer) in enumerate(lengths)]
    batch = collate(samples, EOS_ID, pack=True)
    answers = sum(len(one.answer) - (not one.prompt) for one in samples)
    assert int((batch.labels != IGNORED).sum()) == answers
    if batch.mask.dim() == 4:
        assert bool(batch.mask.any(-1).all())
        assert int(batch.mask.sum(-1).max()) <= batch.ids.shape[1]
