"""Cross-entropy of reference answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from collm_common.errors import InvalidRequest, UnknownModel
from collm_common.types import AdapterRef
from tests.engine.conftest import Folders
from tests.engine.harness import CONFIG, drain, load, loss, make_engine, prompts, publish, request, with_adapter
from tests.support.models import FAMILIES, random_adapter

A = AdapterRef("a", "1")


@pytest.mark.parametrize("family", FAMILIES)
def test_score_equals_hugging_face_loss(folders: Folders, family: str) -> None:
    """Catches targets shifted by one, the prompt counted in the loss, and an adapter left out."""
    folder = folders(family)
    adapter = random_adapter(folder, 4, 8.0, seed=1)
    engine = make_engine(folder)
    assert engine.load_adapter(engine.stage(A, adapter, 4, 8.0))
    for prompt, reference in (prompts(20, 9), prompts(1, 30, seed=1), prompts(30, 1, seed=2)):
        base, tuned = engine.score(prompt, reference), engine.score(prompt, reference, A)
        assert base.cross_entropy == pytest.approx(loss(load(folder), prompt, reference), abs=1e-4)
        wanted = loss(with_adapter(folder, adapter, 4, 8.0), prompt, reference)
        assert tuned.cross_entropy == pytest.approx(wanted, abs=1e-4)
        assert base.tokens == len(reference)


@pytest.mark.parametrize("step_tokens", [64, 8])
@pytest.mark.parametrize("kv_tokens", [4096, 80])
def test_references_of_answered_requests_are_scored(folders: Folders, step_tokens: int, kv_tokens: int) -> None:
    """Catches scores that depend on chunks, on preemption, on the answer, or on a version published meanwhile."""
    folder = folders("llama")
    old, new = (random_adapter(folder, 4, 8.0, seed=seed) for seed in (1, 2))
    config = replace(CONFIG, step_tokens=step_tokens, kv_bytes=kv_tokens * 512, context_tokens=60)
    engine = make_engine(folder, config)
    publish(engine, A, old, 4, 8.0)
    texts = prompts(12, 17, 20, 9)
    references = prompts(1, 40, 25, 12, seed=1)
    for i, (prompt, reference) in enumerate(zip(texts, references, strict=True)):
        engine.add(request(str(i), prompt, 6, adapter="a", reference=tuple(reference)))
    answers = drain(engine, steps=7)
    publish(engine, AdapterRef("a", "2"), new, 4, 8.0)
    drain(engine, answers)
    models: dict[AdapterRef | None, Any] = {
        A: with_adapter(folder, old, 4, 8.0),
        AdapterRef("a", "2"): with_adapter(folder, new, 4, 8.0),
    }
    assert answers["0"].adapters == {A}
    for i, (prompt, reference) in enumerate(zip(texts, references, strict=True)):
        answer = answers[str(i)]
        assert answer.finish == "length"
        assert answer.done is not None
        assert answer.done.quality is not None
        assert answer.done.quality.tokens == len(reference)
        (ref,) = answer.adapters
        wanted = loss(models[ref], prompt, reference)
        assert answer.done.quality.cross_entropy == pytest.approx(wanted, abs=1e-4)


def test_a_score_begins_anew_after_preemption(folders: Folders) -> None:
    """Catches tokens counted twice when a sequence is thrown out in the middle of its reference."""
    folder = folders("llama")
    engine = make_engine(folder, replace(CONFIG, step_tokens=8, kv_bytes=64 * 512, context_tokens=60))
    texts, reference = prompts(12, 13), prompts(45, seed=1)[0]
    engine.add(request("older", texts[0], 40))
    engine.add(request("scored", texts[1], 1, reference=tuple(reference)))
    done = drain(engine)["scored"].done
    assert engine.preemptions > 0
    assert done is not None
    assert done.quality is not None
    assert done.quality.tokens == len(reference)
    assert done.quality.cross_entropy == pytest.approx(loss(load(folder), texts[1], reference), abs=1e-4)


def test_what_cannot_be_scored_is_refused(folders: Folders) -> None:
    """Catches a division by zero tokens, a context overrun and a score under a version that is not here."""
    engine = make_engine(folders("llama"))
    with pytest.raises(InvalidRequest, match="reference has no tokens"):
        engine.score([1], [])
    with pytest.raises(InvalidRequest, match="context of 128"):
        engine.score([1] * 100, [1] * 29)
    with pytest.raises(UnknownModel, match="a@v1 is not loaded"):
        engine.score([1], [1], A)
