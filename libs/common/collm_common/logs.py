"""Logging for services: one line a record, to standard error, with the service's name."""

from __future__ import annotations

import logging
import sys


def setup(service: str, level: str) -> None:
    """Configure the root logger once, at process start."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s {service} %(levelname).1s %(name)s: %(message)s",
        force=True,
    )
