"""Keys: who may do what, what they may see of each other, and where a secret must never be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec import Struct
from redis.asyncio import Redis

from collm_common.api_keys import ApiKeys
from collm_common.keys import Keys
from collm_dispatcher.ingress.openapi import OPERATIONS
from collm_replica.data_endpoint import DataEndpoint
from collm_replica.finetune.records import check_text
from collm_tools.cli import main
from tests.ingress.support import Front, chat, front, text
from tests.ingress.tuning import LINES, no_digest
from tests.support.broker import Broker
from tests.support.users import denied
from tests.support.waiting import eventually

FILES, JOBS, COMPLETIONS = "/v1/files", "/v1/fine_tuning/jobs", "/v1/completions"
OF_A = "m-ours"
TRAINING = {"model": "m", "suffix": "ours"}


def form() -> aiohttp.FormData:
    made = aiohttp.FormData()
    made.add_field("purpose", "fine-tune")
    made.add_field("file", "\n".join(LINES).encode(), filename="data.jsonl")
    return made


class Things(Struct):
    """What tenant a has."""

    file: str
    job: str
    answer: str


class Case(Struct):
    """What tenant b asks for with the ids of a's things, and what it must be answered."""

    status: int
    id: str = ""
    body: dict[str, Any] | None = None


def table(of_a: Things) -> dict[tuple[str, str], Case]:
    job = Case(404, of_a.job)
    return {
        ("post", "/v1/chat/completions"): Case(404, body=chat(model=OF_A)),
        ("post", COMPLETIONS): Case(404, body=text(model=f"{OF_A}@v1")),
        ("post", "/v1/load_lora_adapter"): Case(403, body={"lora_name": OF_A, "lora_path": "x", "load_inplace": True}),
        ("post", "/v1/unload_lora_adapter"): Case(404, body={"lora_name": OF_A}),
        ("get", "/v1/models"): Case(200),
        ("get", "/v1/models/{id}"): Case(404, OF_A),
        ("post", FILES): Case(200),
        ("get", FILES): Case(200),
        ("get", FILES + "/{id}"): Case(404, of_a.file),
        ("delete", FILES + "/{id}"): Case(404, of_a.file),
        ("get", FILES + "/{id}/content"): Case(404, of_a.file),
        ("post", JOBS): Case(404, body={**TRAINING, "training_file": of_a.file}),
        ("get", JOBS): Case(200),
        ("get", JOBS + "/{id}"): job,
        ("post", JOBS + "/{id}/cancel"): job,
        ("post", JOBS + "/{id}/pause"): job,
        ("post", JOBS + "/{id}/resume"): job,
        ("get", JOBS + "/{id}/events"): job,
        ("get", JOBS + "/{id}/checkpoints"): job,
        ("post", "/v1/feedback"): Case(404, body={"id": of_a.answer, "answer": "mine"}),
        ("delete", "/v1/feedback/{id}"): Case(200, of_a.answer),
        ("post", "/v1/replicas/{id}/data"): Case(403, "r1", {"prompt": "a", "completion": "b"}),
        ("get", "/health"): Case(200),
        ("get", "/ready"): Case(200),
        ("get", "/metrics"): Case(403),
        ("get", "/openapi.json"): Case(200),
    }


@asynccontextmanager
async def guarded(redis: Redis, keys: Keys, tokenizer: Path, data: Path, **changes: Any) -> AsyncIterator[Front]:
    """A cell that requires keys, whose only replica takes data."""
    async with front(redis, keys, tokenizer, api_keys=True, adapter_dir=str(data), **changes) as site:
        endpoint = DataEndpoint(data, 1 << 20, check_text, no_digest, lambda: "")
        port = await endpoint.start("127.0.0.1", 0)
        await redis.hset(keys.replica("r1"), "data_url", f"http://127.0.0.1:{port}")
        async with bearer(redis, keys, "ops", operator=True) as ops:
            await eventually(lambda: _takes_data(site, ops))
        try:
            yield site
        finally:
            await endpoint.close()


async def _takes_data(site: Front, ops: dict[str, str]) -> bool:
    async with site.http.post("/v1/replicas/r1/data", data="", headers=ops) as response:
        return response.status != 503


@asynccontextmanager
async def bearer(redis: Redis, keys: Keys, tenant: str, **allowed: Any) -> AsyncIterator[dict[str, str]]:
    """The header of a key, which is revoked afterwards."""
    known = ApiKeys(redis, keys)
    secret, made = await known.create(tenant, **allowed)
    yield {"Authorization": f"Bearer {secret}"}
    await known.revoke(made.prefix)


async def ask(site: Front, method: str, path: str, headers: dict[str, str], **kwargs: Any) -> tuple[int, str]:
    async with site.http.request(method, path, headers=headers, **kwargs) as response:
        return response.status, await response.text()


async def things(site: Front, redis: Redis, keys: Keys, a: dict[str, str]) -> Things:
    async with site.http.post(FILES, data=form(), headers=a) as response:
        file = (await response.json())["id"]
    status, job = await site.post(JOBS, {**TRAINING, "training_file": file}, headers=a)
    assert status == 200, job
    await redis.hset(keys.adapter(OF_A), mapping={"model": "m", "version": 1, "published": "1"})
    await redis.sadd(keys.adapters, OF_A)
    await eventually(lambda: _seen(site, a))
    _, answer = await site.post(COMPLETIONS, text(), headers=a)
    assert (await site.post("/v1/feedback", {"id": answer["id"], "answer": "ours"}, headers=a))[0] == 200
    return Things(file, job["id"], answer["id"])


async def _seen(site: Front, headers: dict[str, str]) -> bool:
    return OF_A in (await ask(site, "get", "/v1/models", headers))[1]


async def test_no_endpoint_shows_or_changes_what_is_another_tenants(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """An endpoint that forgets whose a thing is; one that is new and not in the table."""
    async with (
        guarded(redis, keys, tokenizer_folder, tmp_path) as site,
        bearer(redis, keys, "a", train=True) as a,
        bearer(redis, keys, "b", train=True) as b,
    ):
        # A header of a's name must not help b.
        b |= {"x-llm-d-inference-fairness-id": "a"}
        of_a = await things(site, redis, keys, a)
        cases = table(of_a)
        assert cases.keys() == {(operation.method, operation.path) for operation in OPERATIONS}
        for (method, path), case in cases.items():
            body: dict[str, Any] = {"data": form()} if (method, path) == ("post", FILES) else {"json": case.body}
            status, told = await ask(site, method, path.replace("{id}", case.id), b, **body)
            assert status == case.status, (method, path, told)
            shown = [each for each in (of_a.file, of_a.job, OF_A) if each in told]
            assert status != 200 or not shown, (method, path, told)
        assert (await ask(site, "get", f"{FILES}/{of_a.file}/content", a)) == (200, "\n".join(LINES))
        _, job = await ask(site, "get", f"{JOBS}/{of_a.job}", a)
        assert '"status": "queued"' in job
        assert await _seen(site, a)
        _, gone = await ask(site, "delete", f"/v1/feedback/{of_a.answer}", a)
        assert '"deleted": true' in gone
        if int((await redis.info("server"))["redis_version"].split(".")[0]) >= 7:
            assert await denied(redis) == []


async def test_without_a_good_key_nothing_is_answered(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A key that passes after it was revoked, or an endpoint in front of the gate."""
    async with guarded(redis, keys, tokenizer_folder, tmp_path) as site:
        async with bearer(redis, keys, "a") as gone:
            assert (await ask(site, "post", COMPLETIONS, gone, json=text()))[0] == 200
            assert (await ask(site, "get", FILES, gone))[0] == 403
        for headers in ({}, {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer nobody"}, gone):
            for route in site.ingress.routes.app().router.routes():
                path = route.resource.canonical if route.resource is not None else "/"
                status, told = await ask(site, route.method, path.replace("{id:.+}", "x"), headers)
                assert status == (200 if path in ("/health", "/ready", "/openapi.json") else 401), (path, told)
            assert (await ask(site, "get", "/live/state", headers))[0] == 401


async def test_limits_hold_over_two_ingresses(redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path) -> None:
    """As many times the limit as there are ingresses, or a stream that stays counted after its end."""
    async with (
        guarded(redis, keys, tokenizer_folder, tmp_path, step_s=0.02) as one,
        front(redis, keys, tokenizer_folder, replicas=0, api_keys=True) as other,
        bearer(redis, keys, "a", streams=2) as narrow,
        bearer(redis, keys, "a", tokens_per_minute=5) as short,
        bearer(redis, keys, "a", requests_per_minute=40, slo_classes=("default",)) as few,
    ):
        sites = (one, other)
        body = text(max_tokens=40)
        told = await asyncio.gather(*(ask(sites[n % 2], "post", COMPLETIONS, narrow, json=body) for n in range(6)))
        assert sorted(status for status, _ in told) == [200, 200, 429, 429, 429, 429]
        assert (await ask(other, "post", COMPLETIONS, narrow, json=text()))[0] == 200
        assert (await ask(one, "post", COMPLETIONS, short, json=text()))[0] == 200
        async with other.http.post(COMPLETIONS, json=text(), headers=short) as response:
            # A minute that begins between the two counts anew.
            assert response.status == 429 or await _minutes_differ(redis, keys)
            assert response.status == 200 or 1 <= int(response.headers["Retry-After"]) <= 60
        status, why = await ask(one, "post", COMPLETIONS, few | {"x-slo-ttft-ms": "500"}, json=text())
        assert (status, "default" in why) == (403, True)
        many = [(await ask(sites[n % 2], "get", "/v1/models", few))[0] for n in range(120)]
        assert 429 in many
        assert 39 <= many.count(200) <= 80


async def _minutes_differ(redis: Redis, keys: Keys) -> bool:
    names = [name async for name in redis.scan_iter(keys.usage("*").replace("{", "?").replace("}", "?"))]
    return len({await redis.hget(name, "minute") for name in names}) > 1


async def test_a_secret_is_shown_once_and_is_nowhere_else(
    redis: Redis,
    keys: Keys,
    broker: Broker,
    tokenizer_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A secret in a log, a metric, an error, an event, or in what Redis keeps."""
    caplog.set_level(logging.DEBUG)

    async def collm(*arguments: str) -> str:
        assert await asyncio.to_thread(main, ["keys", *arguments, "--redis", broker.url_of("launcher")]) == 0
        return capsys.readouterr().out

    secret = (await collm("create", "ours", "--train", "--operator", "--streams", "3")).strip()
    headers = {"Authorization": f"Bearer {secret}"}
    said = [await collm("list")]
    async with guarded(redis, keys, tokenizer_folder, tmp_path) as site:
        said += [(await ask(site, "post", COMPLETIONS, headers, json=each))[1] for each in (text(), text(n=-1))]
        said += [(await ask(site, "get", path, headers))[1] for path in ("/metrics", "/live/state", "/v1/nothing")]
        said += [(await ask(site, "delete", f"{FILES}/nothing", headers))[1]]
        said += [(await ask(site, "get", "/v1/models", {"Authorization": f"Bearer {secret}x"}))[1]]
        said += [(await ask(site, "get", "/v1/models", {"Authorization": secret}))[1]]
        rows = [row for _, row in await redis.xrange(keys.audit)]
        said += [await collm("revoke", secret[:15])]
    kept = [str(await redis.dump(name)) for name in await redis.keys("*")]
    # The beginning is for display; the rest must be nowhere.
    assert [each for each in (*said, *kept, caplog.text) if secret[15:] in each] == []
    assert secret[:15] in said[0]
    assert rows[0][b"what"] == f"create {secret[:15]}".encode()
    assert rows[-1] == {
        b"who": secret[:15].encode(),
        b"tenant": b"ours",
        b"what": f"DELETE {FILES}/nothing".encode(),
        b"outcome": b"404 file_not_found",
    }
