"""A primary, its copy, and a Sentinel that watches them: three real processes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import redis as blocking_redis

from tests.support.broker import Broker, free_port, server_binary

NAME = "cell"


class Watched:
    """The copy is up to date when `start` returns. `primary` and `copy` are what they were at the start."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        for name in ("primary", "copy"):
            (folder / name).mkdir()
        self.primary, self.copy = Broker(folder / "primary"), Broker(folder / "copy")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The first of the Sentinels that it names is not there."""
        return f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{self.port}/{NAME}"

    def start(self) -> None:
        """Raises AssertionError if the Sentinel does not find the copy."""
        self.primary.start()
        self.copy.start()
        with blocking_redis.Redis(port=self.primary.port) as client:
            client.config_set("repl-diskless-sync-delay", "0")
        with blocking_redis.Redis(port=self.copy.port) as client:
            client.replicaof("127.0.0.1", self.primary.port)
        with blocking_redis.Redis(port=self.primary.port) as client:
            client.set("there", "before")
            assert client.wait(1, 20_000) == 1
        lines = (
            f"port {self.port}\nbind 127.0.0.1\ndir {self.folder}",
            f"sentinel monitor {NAME} 127.0.0.1 {self.primary.port} 1",
            f"sentinel down-after-milliseconds {NAME} 500\nsentinel failover-timeout {NAME} 5000",
        )
        (self.folder / "sentinel.conf").write_text("\n".join(lines) + "\n")
        with (self.folder / "log").open("wb") as log:
            command = [server_binary(), str(self.folder / "sentinel.conf"), "--sentinel"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._await_copy()

    def name_the_copy(self) -> None:
        """From now on the copy is called the primary; the primary lives on and takes writes, and nobody copies them."""
        with blocking_redis.Redis(port=self.copy.port) as client:
            client.replicaof("NO", "ONE")
        with blocking_redis.Redis(port=self.port) as client:
            client.sentinel_remove(NAME)
            client.sentinel_monitor(NAME, "127.0.0.1", self.copy.port, 1)

    def close(self) -> None:
        """End all three."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(20)
        for broker in (self.primary, self.copy):
            broker.close()

    def _await_copy(self) -> None:
        end_s = time.monotonic() + 20
        with blocking_redis.Redis(port=self.port) as client:
            while True:
                try:
                    if any(copy["master-link-status"] == "ok" for copy in client.sentinel_slaves(NAME)):
                        return
                except blocking_redis.ConnectionError:
                    pass
                assert time.monotonic() < end_s, (self.folder / "log").read_text()
