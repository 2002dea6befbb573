"""`make compose-test`: the stack of docker-compose.yml in a real Docker engine, as an operator meets it.

Needs root, debootstrap, docker and compose. Pulls no image: the bases are made from Debian packages (bases.sh).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "collm-test"
URL = "http://127.0.0.1:{port}"
SERVICES = ("redis", "dispatcher", "replica-1", "replica-2", "replica-3", "launcher", "coordinator")
KEYS = ("replicas", "replica:r1", "lease:r1", "subflow:r1", "events", "telemetry", "adapter:tuned", "lease:launcher")
STOP_ENGINE = (
    "for file in /proc/[0-9]*/cmdline; do "
    "if tr '\\0' ' ' <$file | grep -q 'collm_replica[.]inference'; "
    "then kill -STOP $(echo $file | cut -d/ -f3); fi; done"
)
SAMPLES = 40
START_S, ANSWER_S, ROUND_S, STUCK_S = 600.0, 120.0, 900.0, 110.0
HYPER = {"rank": 4, "alpha": 8.0, "learning_rate": 1e-3, "max_tokens": 64, "snapshot_steps": 2, "heldout_samples": 4}
ENVIRONMENT = {
    "COLLM_BASE_IMAGE": "collm-test/base",
    "COLLM_BUILD_IMAGE": "collm-test/build",
    "COLLM_REDIS_IMAGE": "collm-test/redis",
    "COLLM_PORT": "18000",
    # Small enough for two cores: one short round, soon after the load has sunk.
    "COLLM_REPLICA_CONTEXT_TOKENS": "256",
    "COLLM_REPLICA_KV_MB": "64",
    "COLLM_REPLICA_UNHEALTHY_S": "15",
    "COLLM_LAUNCHER_IDLE": json.dumps({"window": 5, "return_ticks": 600}),
    "COLLM_LAUNCHER_RULES": json.dumps({"rounds": 1, "steps": 4, "hyper": HYPER}),
    "COLLM_LAUNCHER_COOLDOWN_S": "5",
    "COLLM_LOAD_RATE": "0.1",
    "COLLM_LOAD_SECONDS": "120",
    "COLLM_LOAD_TOKENS": "8",
}


class Failed(Exception):
    """What was not as it should be."""


class Compose:
    """The compose command of this machine, for one project."""

    def __init__(self) -> None:
        self._command = _compose_command()
        self._environment = {**os.environ, **ENVIRONMENT}

    def __call__(self, *arguments: str, profile: str = "", check: bool = True) -> str:
        """Standard output. Raises Failed with what went wrong."""
        chosen = ["--profile", profile] if profile else []
        command = [*self._command, "-p", PROJECT, *chosen, *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, text=True, errors="replace", capture_output=True, check=False
        )
        if check and done.returncode:
            raise Failed(f"{' '.join(command)}: {(done.stderr or done.stdout)[-2000:]}")
        return done.stdout

    def health(self) -> dict[str, str]:
        """Service -> what Docker says of its container."""
        found = {}
        for service in SERVICES:
            if container := self("ps", "-q", service, check=False).strip():
                shown = _docker("inspect", "--format", "{{.State.Status}} {{.State.Health.Status}}", container)
                found[service] = shown.strip().removeprefix("running ")
        return found

    def redis(self, *arguments: str) -> list[str]:
        """Lines of a redis-cli, run as the operator."""
        said = self("exec", "-T", "redis", "redis-cli", "--user", "operator", "--pass", "operator", *arguments)
        return said.splitlines()


def _compose_command() -> list[str]:
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    if found := shutil.which("docker-compose"):
        return [found]
    raise Failed("neither `docker compose` nor docker-compose is there")


def _docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], text=True, capture_output=True, check=True).stdout


@contextlib.contextmanager
def engine() -> Iterator[None]:
    """The machine's Docker engine, or one that lives as long as the block."""
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0:
        yield
        return
    folder = Path(os.environ.get("COMPOSE_TEST_ENGINE") or tempfile.mkdtemp(prefix="collm-engine-"))
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["DOCKER_HOST"] = f"unix://{folder}/docker.sock"
    places = ["--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--pidfile", f"{folder}/pid"]
    with (folder / "log").open("ab") as log:
        command = ["dockerd", *places, "--host", os.environ["DOCKER_HOST"]]
        daemon = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_for("a Docker engine", 60, lambda: bool(_docker("version")))
        yield
    finally:
        daemon.terminate()
        daemon.wait(60)


def wait_for(what: str, within_s: float, met: Callable[[], bool]) -> None:
    """Raises Failed after `within_s` seconds; an error of `met` counts as not yet."""
    end_s, last = time.monotonic() + within_s, ""
    while time.monotonic() < end_s:
        try:
            if met():
                print(f"seen: {what}", flush=True)
                return
            last = ""
        except (OSError, subprocess.CalledProcessError, Failed) as error:
            last = f" ({error})"
        time.sleep(1.0)
    raise Failed(f"not within {within_s:g} s: {what}{last}")


def streamed(url: str, question: str) -> str:
    """The text of a streamed chat completion. Raises Failed unless it ends as it should."""
    body = {"model": "smollm2", "messages": [{"role": "user", "content": question}], "stream": True, "max_tokens": 24}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        lines = [line.decode().strip().removeprefix("data: ") for line in answer if line.startswith(b"data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise Failed(f"the stream ended with {lines[-1:]}")
    chunks: list[dict[str, Any]] = [json.loads(line) for line in lines[:-1]]
    if len(chunks) < 3:
        raise Failed(f"{len(chunks)} chunks are no stream")
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def upload(url: str, replica: str) -> None:
    """Private samples for one replica, through the published port."""
    rows = [{"prompt": f"{replica} item {n}?", "completion": f"Shelf {n % 7}, box {n}."} for n in range(SAMPLES)]
    data = "\n".join(json.dumps(row) for row in rows).encode()
    with urllib.request.urlopen(f"{url}/v1/replicas/{replica}/data", data, timeout=30) as answer:
        if json.load(answer)["samples"] != SAMPLES:
            raise Failed(f"{replica} took another number of samples")


def play(compose: Compose, url: str) -> None:
    """Everything that is to be seen, in order."""
    compose("up", "-d")
    wait_for("all healthy", START_S, lambda: compose.health() == dict.fromkeys(SERVICES, "healthy"))
    wait_for("where to send the first request", 30, lambda: f"localhost:{_port()}" in compose("logs", "dispatcher"))
    text = streamed(url, "Name three colours.")
    print(f"seen: a streamed answer: {text!r}", flush=True)
    present = set(compose.redis("--scan"))
    wait_for("the keys in Redis", 30, lambda: present.issuperset(f"{{collm}}:{key}" for key in KEYS))

    compose("up", "-d", "load", profile="load")
    for replica in ("r1", "r2", "r3"):
        upload(url, replica)
    wait_for("a federated round under load", ROUND_S, lambda: round_done(compose))
    wait_for("the load is through", ROUND_S, lambda: bool(outcomes(compose)))
    completed, rejected, failed = outcomes(compose)
    print(f"seen: {completed} requests of the load completed, {rejected} rejected, {failed} failed", flush=True)
    if failed or not completed:
        raise Failed("requests of the load failed")

    compose("kill", "replica-2")
    for _ in range(3):
        streamed(url, "Name three animals.")
    print("seen: answers after a replica was killed", flush=True)
    compose("up", "-d", "replica-2")
    wait_for("the killed replica is back", START_S, lambda: compose.health().get("replica-2") == "healthy")
    compose("exec", "-T", "replica-3", "sh", "-c", STOP_ENGINE)
    wait_for("a stuck engine is unhealthy", STUCK_S, lambda: compose.health().get("replica-3") == "unhealthy")
    wait_for("the stuck engine is replaced", START_S, lambda: compose.health().get("replica-3") == "healthy")
    refused = [line for line in compose("logs").splitlines() if "NOPERM" in line]
    if refused:
        raise Failed(f"the broker refused {len(refused)} commands, the first: {refused[0]}")


def round_done(compose: Compose) -> bool:
    """Whether three updates were combined, judged by three clients, and a verdict was written."""
    kinds = compose.redis("XRANGE", "{collm}:events", "-", "+")
    whole = kinds.count("update_uploaded") >= 3 and kinds.count("evaluated") >= 3 and "aggregated" in kinds
    return whole and ("adapter_published" in kinds or kinds.count("job_changed") > 1)


def outcomes(compose: Compose) -> list[int]:
    """Requests of the load generator: completed, rejected, failed; [] while it runs."""
    found = re.search(r"rejected / failed\D*(\d+) / (\d+) / (\d+)", compose("logs", "load", profile="load"))
    return [int(number) for number in found.groups()] if found else []


def _port() -> str:
    return ENVIRONMENT["COLLM_PORT"]


def main(arguments: Sequence[str]) -> int:
    """0 if all was seen. `--keep` leaves the stack up."""
    with engine():
        compose = Compose()
        subprocess.run([str(ROOT / "tests/compose/bases.sh")], check=True, env={**os.environ, "PYTHON": sys.executable})
        compose("build", profile="load")
        try:
            play(compose, URL.format(port=_port()))
        except (Failed, OSError, subprocess.CalledProcessError) as error:
            print(f"FAILED: {error}\n{compose('logs', '--tail=40', check=False)}", file=sys.stderr)
            return 1
        finally:
            if "--keep" not in arguments:
                compose("down", "--volumes", "--timeout=60", profile="load", check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
