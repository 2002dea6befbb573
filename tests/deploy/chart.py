"""The Helm chart as the real helm renders it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/collm"
PROFILES = ("cpu", "gpu", "gpu-mps", "external-redis", "production")
COMBINATIONS = (*((name,) for name in PROFILES), (), ("gpu", "gpu-mps"), ("gpu", "production"))
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")

Object = dict[str, Any]


def helm(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """One command; what it said, with its exit status."""
    assert HELM is not None
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, check=False, timeout=30, env=environ)


def values(profiles: tuple[str, ...]) -> list[str]:
    """The options that choose profiles, the later over the earlier."""
    return [f"--values={CHART / 'profiles' / name}.yaml" for name in profiles]


@cache
def render(profiles: tuple[str, ...] = (), *options: str) -> tuple[Object, ...]:
    """Every object of a release `demo`."""
    done = helm("template", "demo", str(CHART), *values(profiles), *options)
    assert done.returncode == 0, done.stderr
    return tuple(found for found in yaml.safe_load_all(done.stdout) if found)


def pods(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    """Component -> the pod, of everything that makes one."""
    for found in objects:
        pod = found if found["kind"] == "Pod" else found["spec"].get("template") if "spec" in found else None
        if pod is not None and "spec" in pod:
            yield pod["metadata"]["labels"]["app.kubernetes.io/component"], pod


def containers(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    """Component -> a container that runs in its pod; those that make it ready first included."""
    for component, pod in pods(objects):
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            yield component, container


def environment(container: Object) -> dict[str, str]:
    """What the kubelet would give: references filled in, and what lies in secrets as `secret`."""
    found: dict[str, str] = {}
    for entry in container.get("env", ()):
        source = entry.get("valueFrom", {})
        text = entry.get("value", "secret" if "secretKeyRef" in source else "pod-0")
        for name, value in found.items():
            text = text.replace(f"$({name})", value)
        found[entry["name"]] = text
    return found
