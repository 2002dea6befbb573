"""A service as a process of its own, with a log that tests can read while it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


class Process:
    """`python -m module`; signals go to it alone."""

    def __init__(self, running: asyncio.subprocess.Process, log: Path) -> None:
        self._running, self._log = running, log

    def send(self, number: int) -> None:
        """One signal."""
        self._running.send_signal(number)

    async def kill(self) -> None:
        """End it at once and wait until it is gone."""
        self.send(signal.SIGKILL)
        await self._running.wait()

    def said(self, words: str) -> int:
        """How often its log has `words`."""
        return self._log.read_text().count(words)


@asynccontextmanager
async def process(log: Path, module: str, *arguments: str, **settings: str) -> AsyncIterator[Process]:
    """Ended at the latest with the block; `settings` lose their prefix COLLM_ here."""
    own = {f"COLLM_{name}": value for name, value in settings.items()}
    with log.open("wb") as out:
        running = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, *arguments, env={**os.environ, **own}, stdout=out, stderr=out
        )
    try:
        yield Process(running, log)
    finally:
        if running.returncode is None:
            running.kill()
        await running.wait()
