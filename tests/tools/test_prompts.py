"""Prompts with reference answers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from collm_common.errors import DataError
from collm_tools.load.prompts import Prompt, parse_prompt, random_prompt, read_prompts
from collm_tools.load.runner import plan
from collm_tools.load.traffic import Arrival


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Q", "answer": "A"},
        {"prompt": "Q", "completion": "A"},
        {"prompt": "Q", "canonical_solution": "A", "test": "x"},
        {"instruction": "Q", "output": "A", "input": ""},
        {"text": "Q", "code": "A", "task_id": 3},
        {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]},
    ],
)
def test_every_shape_gives_question_and_reference(row: dict[str, object]) -> None:
    """Catches a shape whose answer is sent as part of the question."""
    assert parse_prompt(json.dumps(row)) == Prompt((("user", "Q"),), "A")


def test_an_instruction_keeps_its_input() -> None:
    """Catches instructions sent without what they speak of."""
    row = {"instruction": "Add", "input": "1 2", "output": "3"}
    assert parse_prompt(json.dumps(row)).messages == (("user", "Add\n1 2"),)


def test_a_dialogue_without_a_last_answer_has_no_reference() -> None:
    """Catches the user's last question taken as the answer."""
    row = {"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]}
    assert parse_prompt(json.dumps(row)) == Prompt((("system", "S"), ("user", "Q")))


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", ""),
        ("3", ""),
        ('{"question": "Q"}', ""),
        ('{"question": "Q", "answer": 4}', "answer"),
        ('{"messages": []}', "messages"),
        ('{"messages": ["hello"]}', "messages[0]"),
        ('{"messages": [{"role": "user", "content": null}]}', "content"),
    ],
)
def test_malformed_prompts_name_line_and_field(tmp_path: Path, text: str, field: str) -> None:
    """Catches an error without its place."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question": "Q", "answer": "A"}\n\n' + text + "\n")
    with pytest.raises(DataError) as caught:
        read_prompts(path)
    assert (caught.value.line, caught.value.field) == (3, field)
    assert str(caught.value).startswith(f"{path}: line 3: ")


def test_empty_and_missing_files_are_refused(tmp_path: Path) -> None:
    """Catches a run that silently has nothing to say."""
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("empty.jsonl", "gone.jsonl"):
        with pytest.raises(DataError, match=name):
            read_prompts(tmp_path / name)


def test_random_prompts_have_the_wanted_length() -> None:
    """Catches characters counted as tokens."""
    assert len(random_prompt(40, random.Random(0)).messages[0][1].split()) == 40


def test_each_prompt_is_used_once_before_any_is_used_again() -> None:
    """Catches drawing with replacement, which leaves some references unscored."""
    prompts = [Prompt((("user", str(n)),), "A") for n in range(5)]
    offers = plan([Arrival(float(n)) for n in range(10)], prompts)
    assert sorted(offer.prompt.messages for offer in offers[:5]) == sorted(p.messages for p in prompts)
    assert sorted(offer.prompt.messages for offer in offers[5:]) == sorted(p.messages for p in prompts)


def test_the_cap_bounds_what_a_trace_asks_for() -> None:
    """Catches a trace's 4000-token answers on a small machine, and short ones stretched to the cap."""
    arrivals = [Arrival(0, 8, 4000), Arrival(1, 8, 5), Arrival(2)]
    assert [offer.max_tokens for offer in plan(arrivals, [], max_tokens=32)] == [32, 5, 32]
