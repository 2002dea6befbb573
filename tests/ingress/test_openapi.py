"""The published description, and what happens to bodies that do not keep to it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from collm_common.keys import Keys
from collm_dispatcher.ingress.openapi import document
from tests.ingress.malformed import send_malformed, values
from tests.ingress.support import Front, front, text
from tests.support.waiting import eventually

COUNT = 1500


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


@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionHeader")
@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionParam")
async def test_malformed_requests_end_in_refusals(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """An internal error, a hang, a stream without its end, or a request that stays open behind a bad body."""
    async with front(redis, keys, tokenizer_folder, adapter_dir=str(tmp_path)) as site:
        statuses = await send_malformed(site, seed=7, count=COUNT)
        assert len(site.ingress.opened) == 0
        await eventually(lambda: not site.replicas["r1"].engine.has_work)
        assert (await site.post("/v1/completions", text()))[0] == 200
        assert await redis.xlen(keys.requests("m", "default")) == 0
    assert {200, 400, 404} <= set(statuses) <= {200, 400, 404, 409, 413, 429, 503}
    assert statuses[400] > COUNT / 2


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
