"""What requests say: prompts with reference answers from JSONL, or random words of a wanted length."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from collm_common.errors import DataError

PAIRS = (
    ("question", "answer"),
    ("prompt", "completion"),
    ("prompt", "canonical_solution"),
    ("instruction", "output"),
    ("text", "code"),
)
WORDS = (
    *("river", "stone", "lamp", "garden", "window", "paper", "yellow", "quiet", "train", "market", "bread", "winter"),
    *("pencil", "engine", "letter", "bridge", "cloud", "silver", "basket", "corner", "summer", "kitchen", "ladder"),
    *("music", "north", "orange", "picture", "road", "shadow", "table", "village", "button", "carpet", "doctor"),
)


@dataclass(frozen=True)
class Prompt:
    """Chat messages as (role, content), and the reference answer ("" if there is none)."""

    messages: tuple[tuple[str, str], ...]
    reference: str = ""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A DataError from inside says which file it is about."""
    try:
        yield
    except DataError as error:
        error.args = (f"{path}: {error}",)
        raise


def read_prompts(path: Path) -> list[Prompt]:
    """Reads question/answer, prompt/completion, instruction/output, text/code or messages, one object a line."""
    if not path.is_file():
        raise DataError(f"no such file: {path}", field="prompts")
    with naming(path), path.open(encoding="utf-8") as file:
        prompts = [parse_prompt(text, line) for line, text in enumerate(file, start=1) if text.strip()]
    if not prompts:
        raise DataError(f"{path} has no prompts", field="prompts")
    return prompts


def parse_prompt(text: str, line: int = 0) -> Prompt:
    """Raises DataError with the line and field."""
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON ({error.msg}); one object per line", line=line) from error
    if not isinstance(row, dict):
        raise DataError("not an object; one object per line", line=line)
    if "messages" in row:
        return _from_messages(row["messages"], line)
    for ask, answer in PAIRS:
        if ask in row and answer in row:
            question = _text(row, ask, line)
            context = _text(row, "input", line) if ask == "instruction" and row.get("input") else ""
            return Prompt((("user", "\n".join(filter(None, (question, context)))),), _text(row, answer, line))
    known = ", ".join(f"{ask}/{answer}" for ask, answer in PAIRS)
    raise DataError(f"has none of messages, {known}; its fields are {', '.join(map(str, row))}", line=line)


def random_prompt(tokens: int, rng: random.Random) -> Prompt:
    """About `tokens` tokens of common words, without a reference."""
    return Prompt((("user", " ".join(rng.choices(WORDS, k=max(1, tokens)))),))


def _from_messages(value: object, line: int) -> Prompt:
    """The last message is the reference if the assistant says it."""
    if not isinstance(value, list) or not value:
        raise DataError("not a list of messages", line=line, field="messages")
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise DataError("a message needs role and content", line=line, field=f"messages[{index}]")
    messages = tuple((message["role"], _text(message, "content", line)) for message in value)
    role, content = messages[-1]
    if role == "assistant" and len(messages) > 1:
        return Prompt(messages[:-1], content)
    return Prompt(messages)


def _text(row: dict[str, object], field: str, line: int) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value:
        raise DataError(f"not a text: {value!r}", line=line, field=field)
    return value
