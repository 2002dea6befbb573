"""The rendered containers as processes: their environment, the broker's users and the probes, all as in a pod."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.deploy.chart import HELM, containers, render
from tests.deploy.kubelet import Kubelet
from tests.support.broker import free_port
from tests.support.models import byte_tokenizer

pytestmark = pytest.mark.skipif(HELM is None, reason="no helm here")
CONTROL = ("launcher", "coordinator", "dispatch-loop")
SERVICES = ("replica", "dispatcher", *CONTROL)


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[Kubelet]:
    """All pods of a release, for an engine without a model."""
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    options = ("replica.settings.engine=fake", "dispatchLoop.replicas=1", f"dispatcher.tokenizer={tmp_path}/tokenizer")
    objects = render((), *(f"--set={option}" for option in options))
    found = {component: container for component, container in containers(objects) if container["name"] != "model"}
    replica = {
        "COLLM_REPLICA_ADVERTISE_HOST": "127.0.0.1",
        "COLLM_REPLICA_PORT": str(free_port()),
        "COLLM_REPLICA_DATA_DIR": str(tmp_path / "data"),
    }
    changed = {"replica": replica, "dispatcher": {"COLLM_DISPATCHER_PORT": str(free_port())}}
    running = Kubelet(objects, tmp_path)
    try:
        await running.start_broker(found["redis"])
        for service in SERVICES:
            await running.start(service, found[service], **changed.get(service, {}))
        yield running
    finally:
        await running.close()


async def test_pods_serve_and_their_probes_say_so(kubelet: Kubelet) -> None:
    """A setting, a right at the broker, a probe or an order to end that works in a template and nowhere else."""
    for service in SERVICES:
        await kubelet.becomes(service, "readinessProbe")
    address = kubelet.address("dispatcher")
    async with aiohttp.ClientSession(address) as http:
        chat = {"model": "smollm2", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        async with http.post("/v1/chat/completions", json=chat) as answer:
            assert answer.status == 200, await answer.text()
        sample = '{"prompt": "a", "completion": "b"}\n'
        async with http.post("/v1/replicas/pod-0/data", data=sample) as answer:
            assert await answer.json() == {"samples": 1}
    assert await kubelet.end("redis") == 0
    for service in CONTROL:
        assert await kubelet.probe(service, "livenessProbe"), "a broker that is away is no reason to start again"
    assert not await kubelet.probe("launcher", "readinessProbe")
    assert not await kubelet.probe("dispatcher", "readinessProbe")
    assert await kubelet.probe("dispatcher", "livenessProbe")
    ended = await asyncio.gather(*(kubelet.end(service) for service in SERVICES))
    assert ended == [0] * len(SERVICES), "\n".join(map(kubelet.said, SERVICES))
