"""Passwords over upgrades: the real helm, and as much of Kubernetes' API as it asks for."""

from __future__ import annotations

import asyncio
import base64
import os

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.deploy.chart import CHART, HELM, helm

pytestmark = pytest.mark.skipif(HELM is None, reason="no helm here")
NAME = "demo-collm-redis"


def cluster(secret: dict[str, str]) -> web.Application:
    """Knows one secret; whatever else is asked for is not there."""

    async def answer(request: web.Request) -> web.Response:
        resources = [{"name": "secrets", "kind": "Secret", "namespaced": True, "verbs": ["get"]}]
        known = {
            "/version": {"major": "1", "minor": "37", "gitVersion": "v1.37.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
            "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": resources},
        }
        if secret:
            data = {user: base64.b64encode(word.encode()).decode() for user, word in secret.items()}
            metadata = {"name": NAME, "namespace": "default"}
            body = {"kind": "Secret", "apiVersion": "v1", "metadata": metadata, "data": data}
            known[f"/api/v1/namespaces/default/secrets/{NAME}"] = body
        if request.path in known:
            return web.json_response(known[request.path])
        gone = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        return web.json_response(gone, status=404)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    return app


async def passwords(installed: dict[str, str]) -> dict[str, str]:
    """What an upgrade writes where `installed` is."""
    async with TestServer(cluster(installed)) as server:
        address = str(server.make_url("")).rstrip("/")
        options = (
            "--dry-run=server",
            "--is-upgrade",
            f"--kube-apiserver={address}",
            "--show-only=templates/secret.yaml",
        )
        environ = {**os.environ, "KUBECONFIG": "/dev/null", "HOME": "/nonexistent"}
        done = await asyncio.to_thread(helm, "template", "demo", str(CHART), *options, environ=environ)
    assert done.returncode == 0, done.stderr
    data: dict[str, str] = yaml.safe_load(done.stdout)["data"]
    return {user: base64.b64decode(word).decode() for user, word in data.items()}


async def test_an_upgrade_keeps_passwords_and_adds_those_of_new_users() -> None:
    """Services that the broker turns away after an upgrade, since it was given new passwords and they were not."""
    first = await passwords({})
    assert all(len(word) == 32 and word.isalnum() for word in first.values())
    old = {user: word for user, word in first.items() if user != "operator"}
    second = await passwords(old)
    assert {user: second[user] for user in old} == old
    assert len(second["operator"]) == 32
