"""One service of the local stack: a process group that is started, watched, restarted within limits, and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from collm_common.errors import CollmError

KILL_WAIT_S = 5.0
WRONG_SETTINGS = 2
"""The exit status of a service that refuses its settings: another start would end the same way."""


class ServiceError(CollmError):
    """A service does not stay up; the message names it and its log."""


@dataclass(frozen=True)
class Spec:
    """What to run. `env` is added to this process's environment, less its own COLLM_ settings.

    One that `may_leave` stays away once it has ended with status 0, as a replica does that was drained.
    """

    name: str
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    may_leave: bool = False


@dataclass(frozen=True)
class RestartPolicy:
    """A crashed process is started again after `backoff_s`, doubled each time up to `backoff_max_s`, `limit` times."""

    limit: int = 5
    backoff_s: float = 0.5
    backoff_max_s: float = 10.0

    def pause_s(self, restarts: int) -> float:
        """Seconds to wait before restart number `restarts`, counted from 0."""
        return min(self.backoff_max_s, self.backoff_s * 2.0**restarts)


class Service:
    """Call `start`, await `watch` in a task, `stop` at the end. Output goes to `log_path`."""

    def __init__(
        self,
        spec: Spec,
        log_path: Path,
        restarts: RestartPolicy | None = None,
        notify: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.spec, self.log_path = spec, log_path
        self.policy = restarts or RestartPolicy()
        self.restarts = 0
        self.process: asyncio.subprocess.Process | None = None
        self._notify = notify
        self._stopping = False

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """Start the process in a group of its own, tied to the life of this one."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("COLLM_")}
        tether = [sys.executable, "-m", "collm_tools.stack.tether", str(os.getpid())]
        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *tether,
                *self.spec.command,
                env={**inherited, **self.spec.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    async def watch(self) -> None:
        """Restart it after each crash, until it is stopped or has left. ServiceError after `limit` restarts."""
        while self.process is not None:
            code = await self.process.wait()
            self._kill_group(self.process.pid)
            if self._stopping:
                return
            if code == 0 and self.spec.may_leave:
                self._notify(f"{self.spec.name} has left")
                return
            if code == WRONG_SETTINGS:
                raise ServiceError(
                    f"{self.spec.name} cannot run with these settings; see {self.log_path}\n{self.tail()}"
                )
            if self.restarts >= self.policy.limit:
                what = f"{self.spec.name} ended with {code} after {self.restarts} restarts"
                raise ServiceError(f"{what}; see {self.log_path}\n{self.tail()}")
            pause_s = self.policy.pause_s(self.restarts)
            self._notify(f"{self.spec.name} ended with {code}; starting it again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            self.restarts += 1
            await self.start()

    def terminate(self) -> None:
        """Ask it to end; it is not restarted."""
        self._stopping = True
        if self.process is not None and self.running:
            self.process.terminate()

    async def stop(self, grace_s: float) -> None:
        """Ask, wait `grace_s`, then kill the whole group, children that were left behind included."""
        self.terminate()
        if self.process is None:
            return
        try:
            async with asyncio.timeout(grace_s):
                await self.process.wait()
        except TimeoutError:
            self._notify(f"{self.spec.name} did not end within {grace_s:g} s: killed")
        self._kill_group(self.process.pid)
        async with asyncio.timeout(KILL_WAIT_S):
            await self.process.wait()

    def tail(self, lines: int = 5) -> str:
        """The last lines of its log, indented."""
        if not self.log_path.is_file():
            return ""
        text = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in text[-lines:])

    @staticmethod
    def _kill_group(group: int) -> None:
        try:
            os.killpg(group, signal.SIGKILL)
        except ProcessLookupError:
            return
