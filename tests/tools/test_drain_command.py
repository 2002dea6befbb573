"""`collm drain`, against a real replica that answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from collm_common.keys import Keys
from collm_common.messages import Delta, Done
from collm_common.registry import Registry
from collm_common.types import ReplicaInfo, ReplicaState, SamplingParams
from collm_tools.cli import main
from tests.replica.support import replies, request, send
from tests.support.broker import Broker
from tests.support.processes import process
from tests.support.waiting import eventually


def other(model: str, ready: bool) -> ReplicaInfo:
    """A replica by the name of r2."""
    return ReplicaInfo("r2", model, "i1", ReplicaState.SERVING, ready=ready, infer_batch_max=8, context_tokens=64)


async def test_a_drained_replica_answers_what_it_has_and_is_gone(
    redis: Redis,
    keys: Keys,
    broker: Broker,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last replica of a model taken away by a slip; a command that ends before the answers do."""

    async def collm(*arguments: str) -> int:
        return await asyncio.to_thread(main, ["drain", *arguments])

    monkeypatch.setenv("COLLM_REDIS_URL", broker.url_of("launcher"))

    registry = Registry(redis, keys)
    settings = {"REDIS_URL": broker.url, "REPLICA_ID": "r1", "REPLICA_MODEL": "none", "REPLICA_SERVED_NAME": "m"}
    settings |= {"REPLICA_ENGINE": "fake", "REPLICA_FAKE_STEP_S": "0.005", "REPLICA_DATA_DIR": str(tmp_path)}
    async with process(tmp_path / "log", "collm_replica", **settings):
        await eventually(lambda: registry.replica("r1"), within_s=30)
        assert await collm("r7") == 2
        assert "there are: r1" in capsys.readouterr().err
        for needless in (other("m", ready=False), other("another", ready=True)):
            await registry.register(needless, 60.0)
            assert await collm("r1") == 2
            assert "--force" in capsys.readouterr().err
        await registry.register(other("m", ready=True), 60.0)
        await send(redis, keys, request(sampling=SamplingParams(max_tokens=400)))
        await eventually(lambda: replies(redis, keys))
        assert isinstance((await replies(redis, keys))[0], Delta)
        assert await collm("r1") == 0
        assert capsys.readouterr().out.splitlines()[-1] == "r1 has left"
    assert isinstance((await replies(redis, keys))[-1], Done)
    assert "told to leave: by hand" in (tmp_path / "log").read_text()
