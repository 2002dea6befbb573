"""Recorded traffic: Azure LLM inference CSV and Mooncake JSONL. Malformed lines raise DataError with their number."""

from __future__ import annotations

import csv
import json
from datetime import datetime
from pathlib import Path

from collm_common.errors import DataError
from collm_tools.load.prompts import naming
from collm_tools.load.traffic import Arrival

AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(path: Path) -> list[Arrival]:
    """By suffix: .csv is Azure's form, .jsonl Mooncake's. The first arrival is at 0 and times ascend."""
    readers = {".csv": azure, ".jsonl": mooncake}
    if path.suffix not in readers:
        raise DataError(f"{path}: a trace is .csv (Azure) or .jsonl (Mooncake)", field="trace")
    if not path.is_file():
        raise DataError(f"no such file: {path}", field="trace")
    with naming(path):
        arrivals = sorted(readers[path.suffix](path), key=lambda arrival: arrival.at_s)
    if not arrivals:
        raise DataError(f"{path} has no requests", field="trace")
    start_s = arrivals[0].at_s
    return [Arrival(a.at_s - start_s, a.prompt_tokens, a.output_tokens) for a in arrivals]


def azure(path: Path) -> list[Arrival]:
    """TIMESTAMP (ISO, any number of fraction digits), ContextTokens, GeneratedTokens."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        stamp, *lengths = AZURE_FIELDS
        missing = [name for name in AZURE_FIELDS if name not in (rows.fieldnames or ())]
        if missing:
            raise DataError(f"the header lacks {', '.join(missing)}", line=1, field="header")
        return [
            Arrival(_stamp(row[stamp], rows.line_num), *(_count(row[name], name, rows.line_num) for name in lengths))
            for row in rows
        ]


def mooncake(path: Path) -> list[Arrival]:
    """One object a line: timestamp (ms), input_length, output_length (tokens)."""
    arrivals = []
    with path.open(encoding="utf-8") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            row = _object(text, line)
            stamp_ms = row.get("timestamp")
            if isinstance(stamp_ms, bool) or not isinstance(stamp_ms, int | float):
                raise DataError(f"not a number of milliseconds: {stamp_ms!r}", line=line, field="timestamp")
            lengths = [_count(row.get(name), name, line) for name in ("input_length", "output_length")]
            arrivals.append(Arrival(stamp_ms / 1000, *lengths))
    return arrivals


def _object(text: str, line: int) -> dict[str, object]:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"not JSON ({error.msg}); one object per line", line=line) from error
    if not isinstance(row, dict):
        raise DataError("not an object; one object per line", line=line)
    return row


def _stamp(value: str | None, line: int) -> float:
    try:
        return datetime.fromisoformat(value or "").timestamp()
    except ValueError as error:
        raise DataError(f"not a time: {value!r}", line=line, field="TIMESTAMP") from error


def _count(value: object, field: str, line: int) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if number < 0:
        raise DataError(f"not a number of tokens: {value!r}", line=line, field=field)
    return number
