"""`collm adapter`, against a populated broker."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from collm_common import blobs
from collm_common.keys import Keys
from collm_tools.cli import main
from tests.support.broker import Broker


async def test_history_and_rollback_from_the_command_line(
    redis: Redis, keys: Keys, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that says it was done and did nothing, or a refusal that names no choice."""
    await redis.hset(keys.adapter("desk"), mapping={"version": 2, "published": "1,2", "model": "m"})
    await blobs.put(redis, keys.adapter_version("desk", 1), b"weights", b"meta")

    async def collm(*arguments: str) -> int:
        return await asyncio.to_thread(main, ["adapter", *arguments, "--redis", broker.url_of("launcher")])

    assert await collm("rollback", "desk", "--reason", "worse") == 0
    assert capsys.readouterr().out == "desk: version 1 is current, after 2\n"
    assert await collm("rollback", "desk", "--to", "7") == 2
    assert "choose among 0, 2" in capsys.readouterr().err
    assert await collm("history", "desk") == 0
    assert "worse" in capsys.readouterr().out
    assert await collm("history", "nobody") == 2
    assert await redis.hget(keys.adapter("desk"), "version") == b"1"
