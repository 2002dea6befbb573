"""Loops that talk to the broker ask here whether they were cancelled."""

from __future__ import annotations

import asyncio


def check_cancelled() -> None:
    """Raise CancelledError if this task was cancelled: redis-py can swallow a cancel that lands as a reply arrives."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
