"""Schemas that take for ever to compile, and those that do not."""

from __future__ import annotations

import json
import random
import string

import pytest
from redis.asyncio import Redis

from collm_common.errors import InvalidRequest
from collm_common.keys import Keys
from collm_common.messages import Done, Failed
from collm_common.types import SamplingParams
from collm_replica.engine.guide import unguided
from collm_replica.schemas import Schemas
from tests.replica.support import replies, request, send, serving, settings
from tests.support.waiting import eventually

DRAW = random.Random(0)
WORDS = ["".join(DRAW.choices(string.ascii_lowercase, k=4)) for _ in range(20)]
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f".*{word}.*"} for word in WORDS]})


async def test_a_schema_without_end_is_refused_and_remembered() -> None:
    """A replica that hangs until it is started again, and hands its request on to the next."""
    asked: list[str] = []
    schemas = Schemas(lambda schema: asked.append(schema) or unguided(schema))  # type: ignore[func-returns-value]
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="more than 1 s or 1024 MiB") as refused:
            await schemas.guide(ENDLESS)
        assert refused.value.param == "response_format"
    assert not asked
    with pytest.raises(InvalidRequest, match="install the extra"):
        await schemas.guide('{"type":"object"}')
    assert asked == ['{"type":"object"}']


async def test_what_is_refused_for_its_schema_keeps_nobody_from_an_answer(redis: Redis, keys: Keys) -> None:
    """One client's schema that ends the answers of all."""
    async with serving(redis, settings()) as running:
        await send(redis, keys, request(sampling=SamplingParams(max_tokens=4, json_schema=ENDLESS)))
        await send(redis, keys, request("q2"))

        async def both() -> bool:
            ends = [reply.id for reply in await replies(redis, keys) if isinstance(reply, Done | Failed)]
            return sorted(ends) == ["q1", "q2"]

        await eventually(both)
        assert not running.engine.has_work
    [failed] = [reply for reply in await replies(redis, keys) if isinstance(reply, Failed)]
    assert (failed.id, failed.status, failed.param) == ("q1", 400, "response_format")
