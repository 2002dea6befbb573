"""Everything that can go wrong between a client and its last token."""

from __future__ import annotations

import asyncio
import io
import re
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.keys import Keys
from collm_common.messages import Delta, Request
from collm_common.requeue import give_up_subflow
from collm_common.types import AdapterRef
from tests.dispatcher.support import register
from tests.ingress.support import SLOW_S, Front, chat, chunks, front, text
from tests.support.waiting import eventually

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DROPPED = "x-llm-d-request-dropped-reason"


async def sent(redis: Redis, key: str) -> list[Request]:
    found = [messages.decode(entry.data) for entry in streams.parse("", await redis.xrange(key))]
    return [message for message in found if isinstance(message, Request)]


async def say(redis: Redis, keys: Keys, ingress: str, *items: messages.Reply) -> None:
    message = messages.Replies(items=items)
    await streams.append(redis, keys.replies(ingress), "replies", items[0].id, messages.encode(message))


async def test_a_full_stream_refuses_and_says_when_to_retry(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """An unbounded queue: every request late instead of a few refused."""
    async with front(redis, keys, tokenizer_folder, step_s=SLOW_S, max_open=1) as site:
        first = asyncio.create_task(site.post(TEXT, text(max_tokens=50)))
        await eventually(lambda: len(site.ingress.opened) == 1)
        async with site.http.post(TEXT, json=text()) as response:
            refused = await response.json()
        other = await site.post(TEXT, text(slo={"e2e_ms": 60_000}))
        assert (await first)[0] == 200
    assert response.status == 429
    assert int(response.headers["Retry-After"]) >= 1
    assert response.headers[DROPPED] == "rejected-saturated"
    assert refused["error"]["type"] == "rate_limit_error"
    assert other[0] == 200


async def test_a_full_queue_of_the_cell_refuses_at_every_ingress(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """A bound that holds at each ingress alone."""
    await register(redis, keys, ready=False)
    async with AsyncExitStack() as stack:
        sites = [
            await stack.enter_async_context(front(redis, keys, tokenizer_folder, replicas=0, max_queued=2))
            for _ in range(2)
        ]
        waiting = [asyncio.create_task(site.post(TEXT, text())) for site in sites]
        await eventually(lambda: _length(redis, keys.requests("m", "default"), 2))
        for site in sites:
            async with site.http.post(TEXT, json=text()) as response:
                assert (response.status, response.headers[DROPPED]) == (429, "rejected-saturated")
                assert int(response.headers["Retry-After"]) >= 1
        for task in waiting:
            task.cancel()
        await eventually(lambda: _length(redis, keys.requests("m", "default"), 0))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_its_generation(
    redis: Redis, keys: Keys, tokenizer_folder: Path, stream: bool
) -> None:
    """Tokens made for nobody, for both kinds of answer."""
    async with front(redis, keys, tokenizer_folder, step_s=SLOW_S) as site:
        engine = site.replicas["r1"].engine
        asked = asyncio.create_task(site.post(TEXT, text(max_tokens=200, stream=stream)))
        await eventually(lambda: engine.running == 1)
        asked.cancel()
        await eventually(lambda: not engine.has_work, 2)
        assert len(site.ingress.opened) == 0
        await eventually(lambda: _length(redis, keys.subflow("r1"), 0))


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """A request that is served although its client gave up in the queue."""
    await register(redis, keys, state="idle")
    async with front(redis, keys, tokenizer_folder, replicas=0) as site:
        await redis.hset(keys.replica("r1"), "ready", "0")
        asked = asyncio.create_task(site.post(TEXT, text()))
        key = keys.requests("m", "default")
        await eventually(lambda: _length(redis, key, 1))
        asked.cancel()
        await eventually(lambda: _length(redis, key, 0))
        await eventually(lambda: len(site.ingress.opened) == 0)


async def _length(redis: Redis, key: str, wanted: int) -> bool:
    return int(await redis.xlen(key)) == wanted


async def test_a_lost_request_goes_on_where_its_client_is(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """Text that is repeated or missing after a replica died in the middle of an answer."""
    async with front(redis, keys, tokenizer_folder, replicas=2, step_s=SLOW_S) as site:
        whole = asyncio.create_task(site.stream(TEXT, text("abcdefg", max_tokens=40)))
        held = [keys.subflow(id_) for id_ in ("r1", "r2")]

        async def first_holder() -> str | None:
            lengths = [await redis.xlen(key) for key in held]
            return next((id_ for id_, length in zip(("r1", "r2"), lengths, strict=True) if length), None)

        await eventually(first_holder)
        holder = await first_holder()
        assert holder is not None
        await eventually(lambda: any(len(open_.tokens) > 5 for open_ in site.ingress.opened))
        await redis.hset(keys.replica(holder), "ready", "0")
        assert await give_up_subflow(redis, keys, holder) == 1
        chunks_ = await whole
        _, again = await site.post(TEXT, text("abcdefg", max_tokens=40))
    assert "".join(choice["text"] for chunk in chunks_ for choice in chunk["choices"]) == again["choices"][0]["text"]
    assert [c["choices"][0]["finish_reason"] for c in chunks_][-1] == "length"


async def test_a_gap_in_the_replies_is_asked_for_again_and_stale_ones_are_dropped(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """A client whose answer misses a piece because the reply stream was trimmed; a pinned version that changes."""
    await register(redis, keys)
    async with front(redis, keys, tokenizer_folder, replicas=0) as site:
        asked = asyncio.create_task(site.post(TEXT, text()))
        await eventually(lambda: _length(redis, keys.subflow("r1"), 1))
        (first,) = await sent(redis, keys.subflow("r1"))
        ref = AdapterRef("desk", "3")
        await say(redis, keys, first.ingress, Delta(first.id, 0, 0, (1,), "a", ref))
        await say(redis, keys, first.ingress, Delta(first.id, 0, 3, (4,), "d", ref))
        await eventually(lambda: _length(redis, keys.subflow("r1"), 2))
        _, second = await sent(redis, keys.subflow("r1"))
        assert (second.attempt, second.prefix, second.version) == (1, (1,), "3")
        await say(
            redis,
            keys,
            first.ingress,
            Delta(first.id, 0, 1, (9,), "stale", ref),
            Delta(first.id, 1, 1, (2, 3), "bc", ref),
            Delta(first.id, 1, 1, (2, 3), "repeated", ref),
            Delta(first.id, 1, 3, (4,), "d", ref, "stop"),
            messages.Done(first.id, 1, 4, 0.0, 0.0, 0.0),
        )
        status, body = await asked
    assert status == 200
    assert body["choices"][0]["text"] == "abcd"
    assert body["usage"]["completion_tokens"] == 4


async def test_attempts_are_bounded(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A request that kills every replica it comes to, for ever."""
    await register(redis, keys)
    async with front(redis, keys, tokenizer_folder, replicas=0, max_attempts=2) as site:
        asked = asyncio.create_task(site.post(TEXT, text()))
        for _ in range(3):
            await eventually(lambda: _length(redis, keys.subflow("r1"), 1))
            await give_up_subflow(redis, keys, "r1")
        status, body = await asked
    assert (status, body["error"]["code"]) == (503, "replicas_lost")


async def test_a_request_without_an_end_times_out(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A client that waits for ever."""
    await register(redis, keys)
    async with front(redis, keys, tokenizer_folder, replicas=0, request_timeout_s=0.2) as site:
        status, body = await site.post(TEXT, text())
        assert len(site.ingress.opened) == 0
    assert (status, body["error"]["code"]) == (504, "timeout")


async def test_an_error_in_the_middle_of_a_stream_is_told_and_the_stream_ends(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """A stream that just stops: its client cannot tell a whole answer from half of one."""
    async with front(redis, keys, tokenizer_folder, step_s=SLOW_S, request_timeout_s=0.5) as site:
        found = await site.stream(TEXT, text(max_tokens=200))
    assert found[-1]["error"]["code"] == "timeout"
    assert found[0]["choices"]


async def test_what_a_replica_refuses_keeps_its_status(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A client error that looks like a broken server."""
    async with front(redis, keys, tokenizer_folder) as site:
        await redis.hset(keys.adapter("desk"), mapping={"model": "m", "version": 3})
        await redis.sadd(keys.adapters, "desk")
        await eventually(lambda: _lists(site, "desk"))
        status, body = await site.post(TEXT, text(model="desk@v2"))
        asked = asyncio.create_task(site.http.post(TEXT, json=text(max_tokens=200)))
        await eventually(lambda: len(site.ingress.opened))
        (open_,) = site.ingress.opened
        open_.take(messages.Failed(open_.request.id, 0, 503, "adapter_slots_full", "come again"))
        async with await asked as full:
            assert (full.status, full.headers["Retry-After"]) == (503, "1")
    assert (status, body["error"]["type"]) == (404, "invalid_request_error")


async def _lists(site: Front, name: str) -> bool:
    return name in {entry["id"] for entry in (await site.get("/v1/models"))[1]["data"]}


async def test_without_a_live_replica_requests_are_refused(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A queue that fills although nobody will ever serve it."""
    async with front(redis, keys, tokenizer_folder, replicas=0) as site:
        status, body = await site.post(TEXT, text())
        ready, _ = await site.get("/ready")
    assert (status, body["error"]["code"], ready) == (503, "no_replica", 503)


async def test_a_shutdown_finishes_what_is_open_and_refuses_what_is_new(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """SIGTERM that cuts answers off."""
    async with front(redis, keys, tokenizer_folder, step_s=SLOW_S) as site:
        asked = asyncio.create_task(site.post(TEXT, text(max_tokens=50)))
        await eventually(lambda: len(site.ingress.opened) == 1)
        drained = asyncio.create_task(site.ingress.drain(20))
        await eventually(lambda: site.ingress.routes.draining)
        refused = await site.post(TEXT, text())
        assert (await site.get("/ready"))[0] == 503
        assert (await asked)[0] == 200
        await drained
    assert (refused[0], refused[1]["error"]["code"]) == (503, "rejected-shutting-down")


async def test_a_deadline_that_passed_in_the_queue_is_a_503_with_its_reason(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """A refusal that a router cannot tell from a crash."""
    await register(redis, keys)
    classes = {"strict": {"e2e_s": 0.1, "late": "reject"}}
    async with front(redis, keys, tokenizer_folder, replicas=0, slo_classes=classes) as site:
        await redis.hset(keys.replica("r1"), "ready", "0")
        async with site.http.post(TEXT, json=text(), headers={"x-slo-class": "strict"}) as response:
            assert response.status == 503
            assert response.headers[DROPPED] == "rejected-ttl-expired"


async def test_open_requests_go_out_again_when_the_broker_was_restarted(
    redis: Redis, keys: Keys, tokenizer_folder: Path, broker: Any
) -> None:
    """Requests that the broker forgot with its last second."""
    await register(redis, keys)
    async with front(redis, keys, tokenizer_folder, replicas=0) as site:
        asked = asyncio.create_task(site.post(TEXT, text()))
        await eventually(lambda: _length(redis, keys.subflow("r1"), 1))
        await redis.delete(keys.subflow("r1"))
        broker.stop()
        broker.start()
        await eventually(lambda: _length(redis, keys.subflow("r1"), 1))
        (again,) = await sent(redis, keys.subflow("r1"))
        assert again.attempt == 1
        asked.cancel()
        await eventually(lambda: len(site.ingress.opened) == 0)


async def test_open_requests_go_out_again_when_the_broker_was_emptied(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """Clients that wait for requests which an operator flushed away."""
    async with front(redis, keys, tokenizer_folder) as site:
        await site.post(TEXT, text())
        await redis.hset(keys.replica("r1"), "ready", 0)
        asked = asyncio.create_task(site.post(TEXT, text()))
        await eventually(lambda: _length(redis, keys.requests("m", "default"), 1))
        await eventually(lambda: redis.keys(keys.lease("ingress-*")))
        await redis.flushall()
        await register(redis, keys)
        assert (await asked)[0] == 200


async def test_training_data_goes_straight_to_the_replica(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """Private text in Redis, an error that loses its line number, a body without a bound."""
    seen: list[bytes] = []

    async def data(request: web.Request) -> web.Response:
        seen.append(await request.read())
        if seen[-1] == b"bad":
            return web.json_response({"error": {"message": "line 1", "param": "messages"}}, status=400)
        return web.json_response({"samples": 2})

    app = web.Application(client_max_size=4 << 20)
    app.router.add_post("/data", data)
    async with TestServer(app) as server:
        await register(redis, keys, data_url=str(server.make_url("")))
        async with front(redis, keys, tokenizer_folder, replicas=0, max_upload_mb=1) as site:
            good = await _upload(site, "r1", b"{}\n{}\n")
            bad = await _upload(site, "r1", b"bad")
            missing = await _upload(site, "nobody", b"x")
            large = await _upload(site, "r1", io.BytesIO(b"x" * (1 << 20) + b"y"))
            endless = await _upload(site, "r1", _endless())
            broken = await _upload(site, "r1", b"{}", headers={"Content-Encoding": "gzip"})
    async with front(redis, keys, tokenizer_folder, replicas=0) as site:
        gone = await _upload(site, "r1", b"x")
    assert good == (200, {"samples": 2})
    assert bad == (400, {"error": {"message": "line 1", "param": "messages"}})
    assert (missing[0], missing[1]["error"]["code"]) == (404, "replica_not_found")
    assert (large[0], large[1]["error"]["code"]) == (413, "payload_too_large")
    assert (endless[0], endless[1]["error"]["code"]) == (413, "payload_too_large")
    assert (broken[0], broken[1]["error"]["param"]) == (400, "body")
    assert (gone[0], gone[1]["error"]["code"]) == (503, "no_replica")
    assert seen[:2] == [b"{}\n{}\n", b"bad"]


async def _upload(site: Front, id_: str, data: Any, **kwargs: Any) -> tuple[int, dict[str, Any]]:
    async with site.http.post(f"/v1/replicas/{id_}/data", data=data, **kwargs) as response:
        return response.status, await response.json()


async def _endless() -> Any:
    for _ in range(40):
        yield b"x" * (1 << 16)


async def test_bodies_over_the_limit_and_unknown_paths_are_openai_errors(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """An HTML error page where a client parses JSON."""
    async with front(redis, keys, tokenizer_folder, max_body_kb=1) as site:
        large = await site.post(TEXT, text("x" * 2000))
        nowhere = await site.post("/v1/nowhere", {})
        long = await site.post(TEXT, text("x" * 300))
        room = await site.post(TEXT, text(max_tokens=1000))
    assert (large[0], large[1]["error"]["param"]) == (413, "body")
    assert (nowhere[0], nowhere[1]["error"]["code"]) == (404, "not_found")
    assert (long[0], long[1]["error"]["code"], long[1]["error"]["param"]) == (400, "context_length_exceeded", "prompt")
    assert (room[0], room[1]["error"]["param"]) == (400, "max_tokens")
    assert "256" in room[1]["error"]["message"]


async def test_clients_cannot_invent_objectives_without_end(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A header that makes a stream, a reader and a key for each of its values."""
    async with front(redis, keys, tokenizer_folder, max_streams=2) as site:
        statuses = []
        for value in ("100", "200", "100", "100.2"):
            async with site.http.post(TEXT, json=text(), headers={"x-slo-e2e-ms": value}) as response:
                statuses.append(response.status)
    assert statuses == [200, 400, 200, 200]


async def test_objectives_that_nobody_uses_make_room_for_others(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """Clients that are refused for ever, because others once tried other limits; metrics with a label for each."""
    async with front(redis, keys, tokenizer_folder, max_streams=2, stream_idle_s=0.05) as site:

        async def accepted(value: str) -> bool:
            async with site.http.post(TEXT, json=text(), headers={"x-slo-e2e-ms": value}) as response:
                return response.status == 200

        for value in ("100", "200", "300"):
            await eventually(partial(accepted, value))
        async with site.http.get("/metrics") as page:
            labels = set(re.findall(r'requests_offered_total\{model_name="m",slo="(.+?)"\}', await page.text()))
    assert labels == {"other"}


async def test_a_damaged_stream_is_our_fault_and_shows(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A client that is told to come again, for ever, and an operator who sees nothing."""
    async with front(redis, keys, tokenizer_folder) as site:
        await redis.set(keys.requests("m", "ttft5000"), "x")
        status, body = await site.post(TEXT, text(slo={"ttft_ms": 5000}))
        assert (status, body["error"]["code"]) == (500, "damaged_key")
        assert keys.requests("m", "ttft5000") in body["error"]["message"]
        assert (await site.post(TEXT, text()))[0] == 200
        async with site.http.get("/metrics") as page:
            assert 'collm:broker_faults_total{kind="WRONGTYPE"}' in await page.text()
        await redis.set(keys.streams, "x")
        status, body = await site.post(TEXT, text())
        assert keys.streams in body["error"]["message"]
        await redis.delete(keys.streams, keys.requests("m", "ttft5000"))
        for slo in ({"ttft_ms": 5000}, "default"):
            assert (await site.post(TEXT, text(slo=slo)))[0] == 200


async def test_a_connection_cut_in_mid_stream_is_no_error(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A handler that fails, or counts an answer, when its client is gone."""
    async with front(redis, keys, tokenizer_folder, step_s=SLOW_S) as site:
        async with aiohttp.ClientSession() as other:
            url = f"http://127.0.0.1:{site.ingress.port}{CHAT}"
            response = await other.post(url, json=chat(max_tokens=150, stream=True))
            await response.content.readany()
            response.close()
        await eventually(lambda: not site.replicas["r1"].engine.has_work, 2)
        await eventually(lambda: len(site.ingress.opened) == 0)
        async with site.http.get("/metrics") as page:
            assert 'collm:requests_cancelled_total{model_name="m"} 1.0' in await page.text()
        assert chunks("data: [DONE]\n\n") == []
