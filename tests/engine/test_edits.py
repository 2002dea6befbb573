"""Penalties, biases and least lengths against a dense computation on the model's own logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from collm_common.errors import InvalidRequest
from collm_common.types import SamplingParams
from collm_replica.engine.sampler import Draw, choose
from tests.engine.conftest import Folders
from tests.engine.harness import drain, generate, load, make_engine, prompts, request
from tests.support.models import EOS_ID, VOCAB

PENALTIES: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 0.7}


@torch.inference_mode()
def greedy(model: Any, prompt: Sequence[int], count: int, params: SamplingParams, ends: set[int]) -> list[int]:
    """Every step runs the whole text and edits a whole row of logits."""
    answer: list[int] = []
    bias = torch.zeros(VOCAB)
    for token, value in params.logit_bias:
        bias[token] = value
    while len(answer) < count and not ends & set(answer):
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, -1].float() + bias
        seen = torch.bincount(torch.tensor(answer, dtype=torch.long), minlength=VOCAB)
        logits -= params.presence_penalty * (seen > 0) + params.frequency_penalty * seen
        if len(answer) < params.min_tokens:
            logits[list(ends)] = -math.inf
        answer.append(int(logits.argmax()))
    return answer


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {"frequency_penalty": -2.0, "presence_penalty": -1.0},
        PENALTIES,
        {"logit_bias": ((7, 100.0),)},
        {"logit_bias": ((7, 100.0), (9, 99.0)), **PENALTIES},
        {"logit_bias": ((EOS_ID, 100.0),), "ignore_eos": False},
        {"logit_bias": ((EOS_ID, 100.0),), "ignore_eos": False, "min_tokens": 5},
        {"logit_bias": ((EOS_ID, 100.0), (8, 90.0)), "stop_tokens": (8,), "ignore_eos": False, "min_tokens": 3},
        {"logit_bias": ((8, 90.0),), "stop_tokens": (8,)},
    ],
    ids=str,
)
def test_edited_answers_are_those_of_a_dense_computation(folders: Folders, fields: dict[str, Any]) -> None:
    """Catches penalties of the prompt's tokens, counted twice or once too late, and ends before their time."""
    engine, model = make_engine(folders("llama")), load(folders("llama"))
    texts = prompts(7, 20)
    for i, prompt in enumerate(texts):
        engine.add(request(f"edited{i}", prompt, 16, **fields))
        engine.add(request(f"plain{i}", prompt, 16))
    answers = drain(engine)
    for i, prompt in enumerate(texts):
        params = request("", prompt, 16, **fields).sampling
        ends = {*params.stop_tokens} | (set() if params.ignore_eos else {EOS_ID})
        assert answers[f"edited{i}"].tokens == greedy(model, prompt, 16, params, ends)
        assert answers[f"plain{i}"].tokens == generate(model, prompt, 16)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seen", [1, 8, 15])
def test_penalties_go_on_behind_a_prefix(folders: Folders, seen: int, temperature: float) -> None:
    """Catches a re-dispatched answer that forgets what it has said already and repeats itself."""
    engine, prompt = make_engine(folders("llama")), prompts(11)[0]
    fields: dict[str, Any] = {"temperature": temperature, "seed": 3, "min_tokens": 12, "ignore_eos": False, **PENALTIES}
    engine.add(request("whole", prompt, 16, **fields))
    whole = drain(engine)["whole"].tokens
    engine.add(request("rest", prompt, 16, attempt=1, prefix=tuple(whole[:seen]), **fields))
    assert drain(engine)["rest"].tokens == whole[seen:]


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest() -> None:
    """Catches a threshold that is absolute, or taken after top_p has cut."""
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()

    def found(**fields: float) -> set[int | None]:
        params = SamplingParams(temperature=1.0, **fields)  # type: ignore[arg-type]
        return set(choose(logits.repeat(2000, 1), [Draw(params, position) for position in range(2000)]).tolist())

    assert found(min_p=0.4) == {0, 1}
    assert found(min_p=0.25) == {0, 1, 2}
    assert found(min_p=0.4, top_p=0.7) == {0, 1}
    assert found(min_p=1.0) == {0}


def test_edits_do_not_reach_other_rows() -> None:
    """Catches a bias written into the wrong row of the batch, or into the model's own logits."""
    logits = torch.tensor([[3.0, 1.0, 2.0]]).repeat(3, 1)
    params = SamplingParams()
    draws = [Draw(params, 0), Draw(params, 0, {1: 9.0, 0: -math.inf}), Draw(params, 0, {0: -2.0})]
    assert choose(logits, draws).tolist() == [0, 1, 2]
    assert logits[:, 1].tolist() == [1.0] * 3


@pytest.mark.parametrize("fields", [{"logit_bias": ((VOCAB, 1.0),)}, {"stop_tokens": (VOCAB,)}])
def test_tokens_outside_the_vocabulary_are_refused(folders: Folders, fields: dict[str, Any]) -> None:
    """Catches an index error inside the batch that fails every request in it."""
    with pytest.raises(InvalidRequest) as refused:
        make_engine(folders("llama")).add(request("no", [1], **fields))
    assert refused.value.param in ("logit_bias", "stop_token_ids")
