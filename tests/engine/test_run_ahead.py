"""Beginning an iteration before the tokens of the one before are on the host changes no answer."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from collm_common.types import AdapterRef
from tests.engine.conftest import Folders
from tests.engine.harness import CONFIG, Answer, drain, make_engine, prompts, publish, request
from tests.support.models import random_adapter

TEXTS = prompts(12, 17, 20, 9, 30, 5)
REFERENCE = tuple(prompts(40, seed=1)[0])
FIELDS: list[dict[str, Any]] = [
    {"adapter": "a"},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    {"reference": REFERENCE},
    {"presence_penalty": 1.5, "temperature": 0.7, "seed": 5},
    {"ignore_eos": False, "logprobs": 2, "prompt_logprobs": True, "temperature": 2.0, "seed": 4},
    {"stop": ("a", "e", "\x07"), "temperature": 2.0, "seed": 9},
]


def answers(folders: Folders, run_ahead: bool, kv_tokens: int, step_tokens: int) -> dict[str, Answer]:
    folder = folders("llama")
    config = replace(CONFIG, run_ahead=run_ahead, kv_bytes=kv_tokens * 512, context_tokens=72, step_tokens=step_tokens)
    engine = make_engine(folder, config)
    publish(engine, AdapterRef("a", "1"), random_adapter(folder, 4, 8.0, seed=1), 4, 8.0)
    for number, (prompt, fields) in enumerate(zip(TEXTS, FIELDS, strict=True)):
        engine.add(request(str(number), prompt, 24, **fields))
    found = drain(engine, defaultdict(Answer))
    assert engine.running == engine.waiting == 0
    assert engine.free_blocks == min(kv_tokens // 4, config.most_blocks) - 1
    assert engine.free_slots == CONFIG.slots - 1
    return found


@pytest.mark.parametrize("kv_tokens", [4096, 80])
@pytest.mark.parametrize("step_tokens", [64, 9])
def test_answers_are_the_same(folders: Folders, kv_tokens: int, step_tokens: int) -> None:
    """Catches a token too many, one that is lost to preemption, scores counted twice, and a penalty that is late."""
    here, ahead = (answers(folders, way, kv_tokens, step_tokens) for way in (False, True))
    for name, answer in here.items():
        other = ahead[name]
        assert other.tokens == answer.tokens, name
        assert (other.text, other.finish, other.offsets) == (answer.text, answer.finish, answer.offsets)
        assert [one.token for one in other.logprobs] == [one.token for one in answer.logprobs]
        told = FIELDS[int(name)].get("prompt_logprobs", False)
        assert [one.token for one in other.prompt_logprobs] == (TEXTS[int(name)][1:] if told else [])
        assert answer.done is not None
        assert other.done is not None
        if answer.done.quality is not None:
            assert other.done.quality is not None
            assert other.done.quality.tokens == answer.done.quality.tokens
            assert other.done.quality.cross_entropy == pytest.approx(answer.done.quality.cross_entropy, abs=1e-4)


def test_a_request_can_be_cancelled_while_its_token_is_under_way(folders: Folders) -> None:
    """Catches an outcome that meets a sequence that is gone, or another one under its name."""
    folder = folders("llama")
    engine = make_engine(folder, replace(CONFIG, run_ahead=True))
    for _ in range(3):
        engine.add(request("one", TEXTS[0], 8))
        engine.add(request("two", TEXTS[1], 8))
        drain(engine, steps=3)
        assert engine.cancel("one")
        engine.add(request("one", TEXTS[2], 8))
        found = drain(engine)
        assert len(found["two"].tokens) > 0
        assert len(found["one"].tokens) == 8
    whole = make_engine(folder)
    whole.add(request("one", TEXTS[2], 8))
    assert found["one"].tokens == drain(whole)["one"].tokens
