"""Three kinds of real questions with answers, each of another client: school maths, Python and office chores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from collm_replica.finetune.records import Record

CLIENTS = ("maths", "code", "chores")
SHORT_CHARS = 420


def read(data: Path) -> dict[str, list[Record]]:
    """Records by client, none longer than SHORT_CHARS; `data` holds gsm8k, mbpp and self-instruct."""
    sources = {
        "maths": ((row["question"], row["answer"]) for row in _rows(data / "gsm8k" / "train.jsonl")),
        "code": ((row["text"], row["code"]) for row in _rows(data / "mbpp" / "mbpp.jsonl")),
        "chores": _chores(data / "self-instruct" / "seed_tasks.jsonl"),
    }
    return {
        name: [Record((("user", question),), answer) for question, answer in pairs if _short(question, answer)]
        for name, pairs in sources.items()
    }


def _chores(path: Path) -> Iterator[tuple[str, str]]:
    for row in _rows(path):
        for instance in row["instances"]:
            yield f"{row['instruction']}\n{instance['input']}".strip(), instance["output"]


def _short(question: str, answer: str) -> bool:
    return bool(question and answer) and len(question) + len(answer) <= SHORT_CHARS


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)
