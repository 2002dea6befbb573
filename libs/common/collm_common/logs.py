"""Logging for services: one line a record, to standard error, with the service's name."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The request that the current task is about, for its log lines."""


class JsonLines(logging.Formatter):
    """One JSON object a record: time, level, service, logger, message, and request_id and exception where there are."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """A line without line ends."""
        line: dict[str, str] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if about := getattr(record, "request_id", "") or request_id.get():
            line["request_id"] = about
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def setup(service: str, level: str, as_json: bool = False) -> None:
    """Configure the root logger once at process start."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter(f"%(asctime)s {service} %(levelname).1s %(name)s: %(message)s")
    handler.setFormatter(JsonLines(service) if as_json else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
