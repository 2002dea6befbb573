"""The published description, and what happens to bodies that do not keep to it."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from redis.asyncio import Redis

from collm_common.keys import Keys
from collm_dispatcher.ingress.body import ChatBody, CompletionBody
from collm_dispatcher.ingress.openapi import document
from collm_dispatcher.ingress.unsupported import NOT_IN_CHATS
from tests.ingress.support import Front, chat, front, text
from tests.support.waiting import eventually

BODY_COUNT, AT_ONCE = 1200, 24


async def test_every_route_is_described_and_every_description_served(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """A document that lags behind the API."""
    async with front(redis, keys, tokenizer_folder) as site:
        status, found = await site.get("/openapi.json")
        served = {
            (route.method.lower(), route.resource.canonical.replace("{id:.+}", "{id}"))
            for route in site.ingress.routes.app().router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
    assert status == 200
    assert served == {(method, path) for path, operations in found["paths"].items() for method in operations}


def test_every_reference_leads_somewhere_and_names_its_limits() -> None:
    """A document that generators of clients cannot read."""
    found = json.loads(json.dumps(document()))
    schemas = found["components"]["schemas"]
    names = set(_references(found))
    assert {name.rsplit("/", 1)[-1] for name in names} <= schemas.keys()
    assert {"ChatBody", "CompletionBody", "TuningBody", "Job", "Error"} <= schemas.keys()
    assert schemas["ChatBody"]["required"] == ["model", "messages"]
    assert {"type": "null"} in schemas["ChatBody"]["properties"]["n"]["anyOf"]


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if "$ref" in value else []
        return own + [name for each in value.values() for name in _references(each)]
    return [name for each in value for name in _references(each)] if isinstance(value, list) else []


def values(chance: random.Random, depth: int = 0) -> Any:
    """Any JSON value, odd ones more often than usual."""
    odd: list[Any] = [
        None,
        True,
        False,
        0,
        -1,
        1,
        2,
        3,
        0.5,
        -0.0,
        2**31,
        2**63,
        -(2**63),
        1e308,
        10**30,
        "",
        "a",
        "\0",
        "\ud800",
    ]
    odd += ["é" * 300, "x" * 5000, "stop", [], {}, [[]], {"type": "text"}, {"type": "json_object"}, {"$ref": "#"}]
    kind = chance.randrange(8)
    if kind == 0 and depth < 3:
        return [values(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 1 and depth < 3:
        return {str(chance.choice(odd)): values(chance, depth + 1) for _ in range(chance.randrange(4))}
    return chance.choice(odd)


def malformed(chance: random.Random) -> tuple[str, bytes]:
    """A path and a body: a good one of which some fields were replaced, and at times the bytes damaged."""
    kind = chance.choice((ChatBody, CompletionBody))
    body = chat() if kind is ChatBody else text()
    fields = [*(field.name for field in msgspec.structs.fields(kind)), *NOT_IN_CHATS, "unknown"]
    for name in chance.sample(fields, chance.randrange(1, 4)):
        body[name] = values(chance)
    data = json.dumps(body).encode()
    if chance.randrange(8) == 0:
        cut = chance.randrange(len(data))
        data = chance.choice((data[:cut], data[cut:], data[:cut] + bytes([chance.randrange(256)]) + data[cut:]))
    return "/v1/chat/completions" if kind is ChatBody else "/v1/completions", data


async def check(site: Front, path: str, data: bytes) -> int:
    """Status of one answer, which must be whole: an OpenAI error object, a JSON body, or a stream with its end."""
    async with site.http.post(path, data=data) as response:
        body = await response.text()
    context = (response.status, data[:500], body[:500])
    assert response.status < 500 or response.status == 503, context
    if response.status != 200:
        error = json.loads(body)["error"]
        assert error["message"], context
        assert error.keys() == {"message", "type", "param", "code"}, context
    elif response.content_type == "text/event-stream":
        assert body.endswith("data: [DONE]\n\n"), context
    else:
        assert json.loads(body)["choices"], context
    return response.status


async def test_malformed_bodies_end_in_refusals(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """An internal error, a hang, a stream without its end, or a request that stays open behind a bad body."""
    chance = random.Random(7)
    bodies = [malformed(chance) for _ in range(BODY_COUNT)]
    statuses: list[int] = []
    async with front(redis, keys, tokenizer_folder) as site:
        places = asyncio.Semaphore(AT_ONCE)

        async def one(path: str, data: bytes) -> None:
            async with places, asyncio.timeout(30):
                statuses.append(await check(site, path, data))

        await asyncio.gather(*(one(path, data) for path, data in bodies))
        assert len(site.ingress.opened) == 0
        await eventually(lambda: not site.replicas["r1"].engine.has_work)
        assert (await site.post("/v1/completions", text()))[0] == 200
        assert await redis.xlen(keys.requests("m", "default")) == 0
    assert {200, 400} <= set(statuses) <= {200, 400, 404, 413, 429}


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/replicas/r1/data"])
async def test_other_bodies_end_in_refusals(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path, path: str
) -> None:
    """The same for the endpoints that change something."""
    chance = random.Random(11)
    async with front(redis, keys, tokenizer_folder, adapter_dir=str(tmp_path)) as site:
        for _ in range(60):
            body = values(chance)
            if isinstance(body, dict):
                body |= {"lora_name": values(chance), "lora_path": values(chance)}
            async with site.http.post(path, data=json.dumps(body)) as response:
                error = json.loads(await response.text())["error"]
            assert response.status in (400, 404, 503), (body, error)
            assert error["message"]


async def test_unknown_paths_and_methods_are_error_objects(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A page of HTML where an SDK expects JSON."""
    async with front(redis, keys, tokenizer_folder) as site:
        answers = [await _ask(site, method, path) for method, path in (("GET", "/v2"), ("PUT", "/v1/completions"))]
    assert [(status, body["error"]["type"]) for status, body in answers] == [
        (404, "invalid_request_error"),
        (405, "invalid_request_error"),
    ]


async def _ask(site: Front, method: str, path: str) -> tuple[int, dict[str, Any]]:
    response: aiohttp.ClientResponse
    async with site.http.request(method, path) as response:
        return response.status, await response.json()
