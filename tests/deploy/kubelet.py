"""Runs the containers of rendered pods as processes of this machine: their own commands, environment and probes."""

from __future__ import annotations

import asyncio
import base64
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp

from tests.deploy.chart import Object, environment
from tests.support.broker import free_port, server_binary
from tests.support.waiting import eventually

ENTRYPOINTS = {f"collm-{name}": f"collm_{name}" for name in ("dispatcher", "replica", "launcher", "coordinator")}
BROKER = "demo-collm-redis:6379"


class Kubelet:
    """Addresses, folders and ports of the pods become those of this machine; everything else is as it was rendered."""

    def __init__(self, objects: tuple[Object, ...], folder: Path) -> None:
        found = {(each["kind"], each["metadata"]["name"]): each for each in objects}
        secret = found["Secret", "demo-collm-redis"]["data"]
        self._passwords = {user: base64.b64decode(word).decode() for user, word in secret.items()}
        self._config: dict[str, str] = found["ConfigMap", "demo-collm-redis"]["data"]
        self._folder = folder
        self.broker_port = free_port()
        self.running: dict[str, asyncio.subprocess.Process] = {}
        self._containers: dict[str, tuple[Object, dict[str, str]]] = {}

    async def start_broker(self, container: Object) -> None:
        """As the image of Redis would."""
        folder = self._folder / "redis"
        folder.mkdir()
        for name, text in self._config.items():
            text = text.replace("/tmp/users.acl", f"{folder}/filled.acl").replace("/etc/collm", str(folder))
            text = text.replace("dir /data", f"dir {folder}\nport {self.broker_port}")
            (folder / name).write_text(text.replace("redis-server ", f"{shlex.quote(server_binary())} "))
        command = [part.replace("/etc/collm", str(folder)) for part in container["command"]]
        await self._run("redis", command, self._environment(container))

    async def start(self, component: str, container: Object, **changed: str) -> None:
        """`changed` is what this machine has otherwise than a pod."""
        own = self._environment(container) | changed
        self._containers[component] = container, own
        module = ENTRYPOINTS[container["image"].partition(":")[0]]
        await self._run(component, [sys.executable, "-m", module, *container.get("args", ())], own)

    async def probe(self, component: str, name: str) -> bool:
        """Whether the kubelet would be content."""
        container, own = self._containers[component]
        probe = container[name]
        if "exec" in probe:
            command = [sys.executable if part == "python3" else part for part in probe["exec"]["command"]]
            asked = await asyncio.create_subprocess_exec(
                *command, env=self._surroundings(own), stderr=asyncio.subprocess.DEVNULL
            )
            return await asyncio.wait_for(asked.wait(), probe["timeoutSeconds"]) == 0
        try:
            async with (
                aiohttp.ClientSession(self.address(component)) as http,
                http.get(probe["httpGet"]["path"]) as answer,
            ):
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    def address(self, component: str) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._containers[component][1][f'COLLM_{component.upper()}_PORT']}"

    async def becomes(self, component: str, name: str) -> None:
        """Waits until a probe is content; at once an error if the process has ended."""

        async def content() -> bool:
            for needed in ("redis", component):
                assert self.running[needed].returncode is None, self.said(needed)
            return await self.probe(component, name)

        await eventually(content, within_s=60)

    async def end(self, component: str, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        self.running[component].send_signal(number)
        return await asyncio.wait_for(self.running.pop(component).wait(), 30)

    async def close(self) -> None:
        """End whatever runs."""
        for process in self.running.values():
            if process.returncode is None:
                process.kill()
            await process.wait()

    def said(self, component: str) -> str:
        """Its log."""
        return (self._folder / f"{component}.log").read_text()

    def _environment(self, container: Object) -> dict[str, str]:
        keys = (entry.get("valueFrom", {}).get("secretKeyRef", {}).get("key") for entry in container["env"])
        filled: list[dict[str, Any]] = [
            {"name": entry["name"], "value": self._passwords[key]} if key else entry
            for entry, key in zip(container["env"], keys, strict=True)
        ]
        own = environment({"env": filled})
        return {name: text.replace(BROKER, f"127.0.0.1:{self.broker_port}") for name, text in own.items()}

    @staticmethod
    def _surroundings(own: dict[str, str]) -> dict[str, str]:
        return {name: text for name, text in os.environ.items() if not name.startswith("COLLM_")} | own

    async def _run(self, component: str, command: list[str], own: dict[str, str]) -> None:
        with (self._folder / f"{component}.log").open("wb") as log:
            self.running[component] = await asyncio.create_subprocess_exec(
                *command, env=self._surroundings(own), stdout=log, stderr=log
            )
