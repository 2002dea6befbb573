"""Keys that vanish under open requests, and scores whose replica dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.keys import Keys
from collm_common.messages import Delta, Request
from collm_common.requeue import give_up_subflow
from collm_common.types import AdapterRef
from tests.dispatcher.support import register
from tests.ingress.support import front, text
from tests.replica.support import serving
from tests.replica.support import settings as replica_settings
from tests.support.waiting import eventually

TEXT = "/v1/completions"
AGAIN = 'collm:requests_redispatched_total{model_name="m"}'


async def _sent(redis: Redis, key: str) -> list[Request]:
    found = [messages.decode(entry.data) for entry in streams.parse("", await redis.xrange(key))]
    return [message for message in found if isinstance(message, Request)]


async def _say(redis: Redis, keys: Keys, request: Request, delta: Delta) -> None:
    data = messages.encode(messages.Replies(items=(delta,)))
    await streams.append(redis, keys.replies(request.ingress), "replies", request.id, data)


@pytest.mark.parametrize("which", ["original", "subflow", "replies"])
async def test_requests_of_a_stream_that_was_deleted_go_out_again(
    redis: Redis, keys: Keys, tokenizer_folder: Path, which: str
) -> None:
    """Clients that wait for their timeout, because an operator deleted one key."""
    await register(redis, keys, ready=which != "original")
    key = keys.requests("m", "default") if which == "original" else keys.subflow("r1")
    async with front(redis, keys, tokenizer_folder, replicas=0, silent_s=0.2) as site:
        asked = asyncio.create_task(site.post(TEXT, text()))

        async def there() -> list[Request]:
            return await _sent(redis, key)

        await eventually(there)
        (first,) = await there()
        if which == "replies":
            # The answer is complete, and the entry that said so is gone with its stream.
            await redis.delete(keys.subflow("r1"), keys.replies(first.ingress))
        else:
            await redis.delete(key)

        async def second() -> bool:
            return [request.attempt for request in await there()] == [1]

        await eventually(second)
        await redis.hset(keys.replica("r1"), "ready", 1)
        async with serving(redis, replica_settings(context_tokens=256)):
            assert (await asked)[0] == 200


async def test_a_request_that_is_only_slow_stays_where_it_is(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """An answer computed twice because its replica, or its queue, took a while."""
    async with front(redis, keys, tokenizer_folder, step_s=0.2, silent_s=0.02) as site:
        answers = await asyncio.gather(*(site.post(TEXT, text(max_tokens=2)) for _ in range(6)))
        assert {status for status, _ in answers} == {200}
        async with site.http.get("/metrics") as page:
            assert AGAIN not in await page.text()


@pytest.mark.parametrize(("adapter", "scored"), [(None, True), (AdapterRef("desk", "7.2"), False)])
async def test_an_answer_whose_replica_died_before_its_score_is_scored_elsewhere(
    redis: Redis, keys: Keys, tokenizer_folder: Path, adapter: AdapterRef | None, scored: bool
) -> None:
    """A score that is lost with a replica, or one of another version than the answer's."""
    await register(redis, keys)
    async with front(redis, keys, tokenizer_folder, replicas=0) as site:
        asked = asyncio.create_task(site.post(TEXT, text(max_tokens=4, reference="abc")))

        async def there() -> list[Request]:
            return await _sent(redis, keys.subflow("r1"))

        await eventually(there)
        (request,) = await there()
        await _say(redis, keys, request, Delta(request.id, 0, 0, (1, 2, 3, 4), "text", adapter, "length"))
        await eventually(lambda: any(open_.finish for open_ in site.ingress.opened))
        await give_up_subflow(redis, keys, "r1")
        async with serving(redis, replica_settings(context_tokens=256)):
            status, body = await asked
    assert (status, body["choices"][0]["text"]) == (200, "text")
    assert body["usage"]["completion_tokens"] == 4
    assert (body["collm"].get("cross_entropy") is not None) is scored


async def test_a_score_that_cannot_be_had_leaves_the_answer_whole(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """A complete answer that turns into an error because nobody could score it in time."""
    await register(redis, keys)
    async with front(redis, keys, tokenizer_folder, replicas=0, request_timeout_s=1.0) as site:
        asked = asyncio.create_task(site.post(TEXT, text(max_tokens=4, reference="abc")))

        async def there() -> list[Request]:
            return await _sent(redis, keys.subflow("r1"))

        await eventually(there)
        (request,) = await there()
        await _say(redis, keys, request, Delta(request.id, 0, 0, (1, 2, 3, 4), "text", None, "length"))
        status, body = await asked
    assert (status, body["choices"][0]["text"]) == (200, "text")
    assert body["collm"].get("cross_entropy") is None
