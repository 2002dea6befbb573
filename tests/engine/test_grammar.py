"""Answers that follow a JSON schema, whatever the model would have said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from collm_common.errors import InvalidRequest
from collm_replica.engine.fake import FakeEngine
from tests.engine.conftest import Folders
from tests.engine.harness import drain, generate, load, make_engine, prompts, request

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"enum": [3, 4]}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
FIELDS: dict[str, Any] = {"json_schema": json.dumps(SCHEMA), "ignore_eos": False, "max_tokens": 110}


def follows(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["kind", "legs"] and value["kind"] in ("cat", "dog") and value["legs"] in (3, 4)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.5}, {"temperature": 1.0, "top_p": 0.9}], ids=str)
def test_an_answer_follows_its_schema_and_ends(folders: Folders, sampling: dict[str, Any]) -> None:
    """Catches a mask on the wrong row, one that is a token late, and JSON that goes on behind its end."""
    engine, model = make_engine(folders("llama")), load(folders("llama"))
    texts = prompts(5, 9, 14)
    for i, prompt in enumerate(texts):
        engine.add(request(f"guided{i}", prompt, seed=i, **FIELDS, **sampling))
        engine.add(request(f"plain{i}", prompt, 12))
    answers = drain(engine)
    for i, prompt in enumerate(texts):
        assert follows(answers[f"guided{i}"].text), answers[f"guided{i}"].text
        assert answers[f"guided{i}"].finish == "stop"
        assert answers[f"plain{i}"].tokens == generate(model, prompt, 12)


@pytest.mark.parametrize("seen", [1, 8, -1])
def test_a_schema_goes_on_behind_a_prefix(folders: Folders, seen: int) -> None:
    """Catches JSON that begins anew in the middle of an answer after a replica died."""
    engine, prompt = make_engine(folders("qwen2")), prompts(7)[0]
    engine.add(request("whole", prompt, seed=3, temperature=1.0, **FIELDS))
    whole = drain(engine)["whole"].tokens
    engine.add(request("rest", prompt, seed=3, temperature=1.0, attempt=1, prefix=tuple(whole[:seen]), **FIELDS))
    assert drain(engine)["rest"].tokens == whole[seen:]


@pytest.mark.parametrize(
    "schema", ["{", '{"type":"nope"}', '{"type":"string","pattern":"(("}', '{"$ref":"http://127.0.0.1/x"}', "[1]"]
)
def test_schemas_that_cannot_be_followed_are_refused(folders: Folders, schema: str) -> None:
    """Catches an engine that fails with a batch, fetches something, or ignores what it does not understand."""
    with pytest.raises(InvalidRequest) as refused:
        make_engine(folders("llama")).add(request("no", [1], json_schema=schema))
    assert refused.value.param == "response_format"


def test_an_engine_without_guides_says_so() -> None:
    """Catches a schema that is ignored where nothing can follow it."""
    engine = FakeEngine()
    with pytest.raises(InvalidRequest, match="response_format") as refused:
        engine.add(request("no", [1], json_schema="{}"))
    assert refused.value.code == "unsupported_parameter"
    assert not engine.has_work
