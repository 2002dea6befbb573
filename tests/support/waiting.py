"""Waiting for a condition, with a deadline: what tests do instead of sleeping."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable


async def eventually(condition: Callable[[], object | Awaitable[object]], within_s: float = 20.0) -> None:
    """Return once `condition()` (or what it awaits) is true; AssertionError after `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"not true within {within_s:g} s: {_source(condition)}")
        await asyncio.sleep(0.01)


def _source(condition: Callable[[], object]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except TypeError:
        return repr(condition)
