"""Greedy answers are, token by token, those of Hugging Face and PEFT."""

from __future__ import annotations

from dataclasses import replace

import pytest

from collm_common.types import AdapterRef
from tests.engine.conftest import Folders
from tests.engine.harness import CONFIG, drain, generate, load, make_engine, prompts, publish, request, with_adapter
from tests.support.models import FAMILIES, random_adapter

A, B = AdapterRef("a", "1"), AdapterRef("b", "1")
WINDOWS = {
    "mistral": {"sliding_window": 7},
    "qwen2": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step_tokens", [64, 9])
def test_base_and_two_adapters_in_one_batch(folders: Folders, family: str, step_tokens: int) -> None:
    """Catches a token run with another's adapter, scale or position, and chunks that lose a token between them."""
    folder = folders(family)
    first = random_adapter(folder, 8, 16.0, seed=1)
    second = random_adapter(folder, 3, 4.0, ["q_proj", "v_proj", "down_proj"], seed=2)
    engine = make_engine(folder, replace(CONFIG, step_tokens=step_tokens))
    publish(engine, A, first, 8, 16.0)
    publish(engine, B, second, 3, 4.0)
    adapters = ["a", "b", "", "b", "a", ""]
    texts = prompts(9, 21, 33, 14, 50, 1)
    for i, (adapter, prompt) in enumerate(zip(adapters, texts, strict=True)):
        engine.add(request(str(i), prompt, adapter=adapter))
    answers = drain(engine)
    models = {"": load(folder), "a": with_adapter(folder, first, 8, 16.0), "b": with_adapter(folder, second, 3, 4.0)}
    wanted = [generate(models[adapter], prompt) for adapter, prompt in zip(adapters, texts, strict=True)]
    assert [answers[str(i)].tokens for i in range(len(texts))] == wanted
    assert generate(models["a"], texts[0]) != generate(models[""], texts[0])


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tied_embeddings(folders: Folders, family: str) -> None:
    """Catches an output head that is not the embedding."""
    folder = folders(family, tie_word_embeddings=True)
    engine = make_engine(folder)
    texts = prompts(5, 17)
    for i, prompt in enumerate(texts):
        engine.add(request(str(i), prompt))
    answers = drain(engine)
    assert [answers[str(i)].tokens for i in range(2)] == [generate(load(folder), prompt) for prompt in texts]


@pytest.mark.parametrize("family", sorted(WINDOWS))
@pytest.mark.parametrize("step_tokens", [64, 9])
def test_sliding_windows(folders: Folders, family: str, step_tokens: int) -> None:
    """Catches a window that is off by one, ignored, or used in layers that have none."""
    folder = folders(family, **WINDOWS[family])
    engine = make_engine(folder, replace(CONFIG, step_tokens=step_tokens))
    texts = prompts(5, 6, 7, 8, 30)
    for i, prompt in enumerate(texts):
        engine.add(request(str(i), prompt))
    answers = drain(engine)
    model = load(folder)
    assert [answers[str(i)].tokens for i in range(5)] == [generate(model, prompt) for prompt in texts]
    assert generate(model, texts[4]) != generate(load(folders(family)), texts[4])


def test_a_swap_in_mid_flight(folders: Folders) -> None:
    """Catches a running request that changes its version, a new one that gets the old, and a slot kept for ever."""
    folder = folders("llama")
    old, new = (random_adapter(folder, 4, 8.0, seed=seed) for seed in (1, 2))
    engine = make_engine(folder)
    publish(engine, A, old, 4, 8.0)
    prompt = prompts(11)[0]
    engine.add(request("before", prompt, adapter="a"))
    answers = drain(engine, steps=4)
    publish(engine, AdapterRef("a", "2"), new, 4, 8.0)
    assert engine.free_slots == 1
    engine.add(request("after", prompt, adapter="a"))
    drain(engine, answers)
    assert answers["before"].tokens == generate(with_adapter(folder, old, 4, 8.0), prompt)
    assert answers["after"].tokens == generate(with_adapter(folder, new, 4, 8.0), prompt)
    assert answers["before"].adapters == {A}
    assert answers["after"].adapters == {AdapterRef("a", "2")}
    assert engine.free_slots == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_sequences_go_on_as_if_nothing_was(folders: Folders, family: str) -> None:
    """Catches lost or repeated tokens, and a version that changes, when KV blocks run out and are computed again."""
    folder = folders(family)
    adapter = random_adapter(folder, 4, 8.0, seed=1)
    tokens_bytes = 2 * 2 * 2 * 16 * 4
    engine = make_engine(folder, replace(CONFIG, kv_bytes=tokens_bytes * 64, context_tokens=60))
    publish(engine, A, adapter, 4, 8.0)
    texts = prompts(12, 13, 14, 15)
    for i, prompt in enumerate(texts):
        engine.add(request(str(i), prompt, 24, adapter="a"))
    answers = drain(engine, steps=3)
    publish(engine, AdapterRef("a", "2"), random_adapter(folder, 4, 8.0, seed=2), 4, 8.0)
    drain(engine, answers)
    model = with_adapter(folder, adapter, 4, 8.0)
    assert engine.preemptions > 0
    assert [answers[str(i)].tokens for i in range(4)] == [generate(model, prompt, 24) for prompt in texts]
    assert [answers[str(i)].offsets for i in range(4)] == [list(range(24))] * 4
