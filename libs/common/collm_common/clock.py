"""Time as a parameter: services get a Clock, tests drive a ManualClock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Protocol


class Clock(Protocol):
    """`now` is Unix time, shared between machines; `monotonic` never jumps; both in seconds."""

    def now(self) -> float:
        """Unix seconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Unix seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since an arbitrary start."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait at least `seconds`, which yields to other tasks even when not positive."""
        await asyncio.sleep(max(0.0, seconds))


class ManualClock:
    """A clock that stands still until it is slept on: every sleep returns at once and moves it."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self.time_s = start_s

    def now(self) -> float:
        """The time it was last moved to."""
        return self.time_s

    def monotonic(self) -> float:
        """The same time: this clock never steps back."""
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        """Move forward by `seconds` and let others run."""
        self.time_s += max(0.0, seconds)
        await asyncio.sleep(0)


def checkpoint() -> None:
    """Raise a cancellation that was swallowed: asyncio.wait_for, which redis-py sends by, does that before 3.12."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def ticks(step_s: float, clock: Clock) -> AsyncIterator[float]:
    """Yield every `step_s` without drift; a tick that took too long skips the missed ones instead of bunching them."""
    due = clock.monotonic()
    while True:
        yield clock.now()
        checkpoint()
        due += step_s
        late = clock.monotonic() - due
        if late > 0:
            due += (late // step_s) * step_s
        await clock.sleep(due - clock.monotonic())
