"""Files and jobs of the API among keys that somebody damaged, and forms and jobs that want too much."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from collm_common.errors import Conflict
from collm_common.keys import Keys
from collm_common.lineage import turns
from collm_dispatcher.ingress.files import MAX_FORM_BYTES, PART_BYTES
from collm_dispatcher.ingress.tuning_store import TuningStore
from tests.ingress.support import front

FILES, JOBS = "/v1/files", "/v1/fine_tuning/jobs"
ROW = {"filename": "x", "bytes": 1, "created_at": 1, "model": "m", "samples": 1, "replicas": "[]"}


@pytest.mark.parametrize("kind", ["file", "tuning"])
async def test_a_damaged_entry_is_named_and_hides_no_other(
    redis: Redis, keys: Keys, tokenizer_folder: Path, kind: str
) -> None:
    """A list that answers 500 for good because one of its entries cannot be read."""
    path = FILES if kind == "file" else JOBS
    key, set_ = (keys.file, keys.files()) if kind == "file" else (keys.tuning, keys.tunings())
    async with front(redis, keys, tokenizer_folder, replicas=0) as site:
        await redis.hset(keys.file("whole"), mapping=ROW)
        whole = "whole"
        if kind == "file":
            await redis.zadd(keys.files(), {whole: 5})
        else:
            whole = (await TuningStore(redis, keys).create("m", "m", "", "whole", "{}", 5)).id
        await redis.set(key("string"), "x")
        await redis.hset(key("empty"), mapping={"other": "x"})
        await redis.hset(key("bytes"), mapping={"model": b"\xff", "state": b"\xff"})
        await redis.hset(key("words"), mapping={**ROW, "bytes": "many", "replicas": "[1", "state": '{"id": 3}'})
        await redis.zadd(set_, {b"\xff": 1, "string": 2, "empty": 3, "bytes": 4, "words": 6, "gone": 7})
        status, body = await site.get(path)
        assert (status, [each["id"] for each in body["data"]]) == (200, [whole])
        for id_ in ("string", "bytes", "words"):
            status, body = await site.get(f"{path}/{id_}")
            assert (status, body["error"]["code"]) == (500, "damaged_key"), id_
            assert key(id_) in body["error"]["message"]
        assert (await site.get(f"{path}/{whole}"))[0] == 200
        if kind == "file":
            assert (await site.get(f"{path}/words/content"))[1]["error"]["code"] == "damaged_key"
            assert (await site.post(JOBS, {"model": "m", "training_file": "empty"}))[1]["error"][
                "code"
            ] == "damaged_key"


async def test_a_job_that_cannot_be_listed_is_not_wanted_either(redis: Redis, keys: Keys) -> None:
    """A job that trains though its client was told of an error and never learnt its id."""
    store = TuningStore(redis, keys)
    await redis.set(keys.tunings(), "x")
    with pytest.raises(ResponseError):
        await store.create("m", "m", "desk", "f", "{}", 1)
    assert await redis.exists(keys.wanted("m")) == 0
    await redis.delete(keys.tunings())
    results = await asyncio.gather(
        *(store.create("m", "m", "desk", "f", "{}", 1) for _ in range(8)), return_exceptions=True
    )
    assert sum(isinstance(result, Conflict) for result in results) == 7
    assert await redis.zcard(keys.tunings()) == len(await redis.keys(keys.tuning("*"))) == 1


async def test_a_cancelled_job_takes_no_other_with_it_and_leaves_no_key(redis: Redis, keys: Keys) -> None:
    """A newer job of the same adapter that is cancelled too, or a key without an end that counts as a job."""
    store = TuningStore(redis, keys)
    old = await store.create("m", "m", "desk", "f", "{}", 1)
    await redis.delete(keys.wanted("m"))
    new = await store.create("m", "m", "desk", "f", "{}", 2)
    assert (await store.cancel(old)).status == "cancelled"
    assert await redis.hgetall(keys.wanted("m")) == {b"desk": new.id.encode()}
    assert await redis.exists(keys.job(old.id)) == 0
    await store.cancel(new)
    assert await redis.exists(keys.wanted("m")) == 0


@pytest.mark.filterwarnings("ignore:unread_data:DeprecationWarning")
@pytest.mark.parametrize("parts", [[1000] * 80, [0] * (MAX_FORM_BYTES // PART_BYTES + 4200)])
async def test_a_form_is_bounded_as_a_whole(redis: Redis, keys: Keys, tokenizer_folder: Path, parts: list[int]) -> None:
    """Memory without a bound by many parts, each of which is small enough."""
    async with front(redis, keys, tokenizer_folder, replicas=0, max_upload_mb=1) as site:
        form = aiohttp.MultipartWriter("form-data")
        for number, size in enumerate([*parts, (1 << 20) - 1]):
            part = form.append("x" * size)
            part.set_content_disposition("form-data", name=f"f{number}")
        async with site.http.post(FILES, data=form) as response:
            body = await response.json()
    assert (response.status, body["error"]["param"]) == (413, "body")


async def test_a_damaged_turn_of_an_adapter_is_left_out(redis: Redis, keys: Keys) -> None:
    """Checkpoints, a rollback and a history that cannot be had because of one entry."""
    key = keys.adapter_history("desk")
    await redis.xadd(key, {"version": "many"})
    await redis.xadd(key, {b"\xff": "x"})
    assert turns(await redis.xrange(key)) == []
