"""Training data as people write it: JSON lines of chat messages, prompt/completion or instruction/output."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from collm_common.errors import DataError

MAX_ERRORS = 10
MAX_FIELD_CHARS = 200_000
SHAPES = "messages, or prompt and completion, or instruction and output"


class Record(Struct, frozen=True):
    """One sample before tokenisation: `messages` up to the answer, and the answer. `chat` False: a bare prompt."""

    messages: tuple[tuple[str, str], ...]
    answer: str
    chat: bool = True


def parse(text: str) -> list[Record]:
    """All records; DataError that lists the first problems with line number, field and value."""
    records: list[Record] = []
    problems: list[DataError] = []
    for number, line in _lines(text):
        try:
            records.append(parse_line(number, line))
        except DataError as error:
            problems.append(error)
            if len(problems) == MAX_ERRORS:
                break
    if problems:
        raise DataError("; ".join(map(str, problems)), field=problems[0].field)
    if not records:
        raise DataError("no samples: expected one JSON object per line", field="body")
    return records


def check_text(text: str) -> int:
    """How many samples `text` has; raises DataError as `parse` does."""
    return len(parse(text))


def parse_line(number: int, line: str) -> Record:
    """One line; raises DataError."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(f"not JSON ({reason}): one object per line, got {_short(line)}", line=number) from error
    if not isinstance(row, dict):
        raise DataError(f"one object per line, got {_short(row)}", line=number)
    if "messages" in row:
        return _chat(number, row["messages"])
    if "instruction" in row:
        question = _text(number, row, "instruction")
        if row.get("input"):
            question += "\n\n" + _text(number, row, "input")
        return Record((("user", question),), _text(number, row, "output"))
    if "prompt" in row:
        return Record((("user", _text(number, row, "prompt")),), _text(number, row, "completion"), chat=False)
    raise DataError(f"needs {SHAPES}; has {_short(sorted(row))}", line=number, field="messages")


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """JSON itself may hold what `str.splitlines` takes for the end of a line, such as U+2028."""
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _chat(number: int, turns: Any) -> Record:
    if not isinstance(turns, list) or len(turns) < 2:
        raise DataError(f"needs at least a question and an answer, got {_short(turns)}", line=number, field="messages")
    read: list[tuple[str, str]] = []
    for index, turn in enumerate(turns):
        where = f"messages[{index}]"
        if not isinstance(turn, dict):
            raise DataError(f"must be an object, got {_short(turn)}", line=number, field=where)
        if turn.get("role") not in ("system", "user", "assistant"):
            raise DataError(
                f"must be system, user or assistant, got {_short(turn.get('role'))}", line=number, field=f"{where}.role"
            )
        read.append((turn["role"], _text(number, turn, "content", f"{where}.")))
    if read[-1][0] != "assistant":
        raise DataError(f"the last must be of the assistant, is of {read[-1][0]}", line=number, field="messages")
    return Record(tuple(read[:-1]), read[-1][1])


def _text(number: int, row: Mapping[str, Any], field: str, where: str = "") -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value:
        raise DataError(f"must be a text that is not empty, got {_short(value)}", line=number, field=where + field)
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError("has half of a surrogate pair, which is no character", line=number, field=where + field)
    if len(value) > MAX_FIELD_CHARS:
        raise DataError(
            f"has {len(value)} characters, the limit is {MAX_FIELD_CHARS}", line=number, field=where + field
        )
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
