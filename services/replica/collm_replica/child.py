"""A child process as its supervisor sees it: start, channel, signs of life, death."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence

from collm_common.clock import Clock
from collm_replica.channel import Alive, AnyLocal, Channel, Ready, ToChild

log = logging.getLogger(__name__)


class Child:
    """One life of `python -m module CHANNEL_FD FDS…`, which inherits `fds` and is sent `greeting` first.

    `environ` is what its environment has beyond this process's.
    """

    def __init__(
        self,
        module: str,
        fds: Sequence[int],
        handle: Callable[[AnyLocal], Awaitable[None]],
        clock: Clock,
        greeting: ToChild | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.module, self._fds, self._handle, self._clock = module, tuple(fds), handle, clock
        self._greeting, self._environ = greeting, {**os.environ, **(environ or {})}
        self.process: asyncio.subprocess.Process | None = None
        self.channel: Channel | None = None
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._progress = -1
        self._moved_s = clock.monotonic()
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Spawn it; `ready` resolves once it has done a real step."""
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), *self._fds)
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self.module, *map(str, fds), pass_fds=fds, env=self._environ
        )
        theirs.close()
        self.channel = await Channel.over(ours)
        self._reader = asyncio.create_task(self._read())
        if self._greeting is not None:
            await self.send(self._greeting)

    async def send(self, message: ToChild) -> bool:
        """Whether the child was there to take it; what it was not is dropped: its successor starts from Redis."""
        if self.channel is None or self.process is None or self.process.returncode is not None:
            return False
        try:
            await self.channel.send(message)
        except ConnectionError:
            return False
        return True

    async def wait(self) -> int:
        """Its exit status, once it is dead."""
        assert self.process is not None
        status = await self.process.wait()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=1.0)
            self._reader.cancel()
        if self.channel is not None:
            self.channel.close()
        if not self.ready.done():
            self.ready.cancel()
        return status

    def still_for(self) -> float:
        """Seconds since it last showed progress (or that it had nothing to do)."""
        return self._clock.monotonic() - self._moved_s

    def kill(self, how: int = signal.SIGKILL) -> None:
        """Signal it if it still lives."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(how)

    async def _read(self) -> None:
        assert self.channel is not None
        while (message := await self.channel.receive()) is not None:
            if isinstance(message, Alive):
                if message.progress != self._progress or not message.busy:
                    self._moved_s = self._clock.monotonic()
                self._progress = message.progress
                continue
            if isinstance(message, Ready) and not self.ready.done():
                self._moved_s = self._clock.monotonic()
                self.ready.set_result(message)
            await self._handle(message)


def die_with_parent() -> None:
    """For the child: ask the kernel to kill it when its supervisor dies, however that happens."""
    import ctypes

    pr_set_pdeathsig = 1
    parent = os.getppid()
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
