"""One request, against a real HTTP server that speaks server-sent events, well and badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from collm_common.types import Slo
from collm_dispatcher.ingress import objectives
from collm_dispatcher.ingress.body import ChatBody, parse
from collm_tools.load.client import RequestRecord, Target, body
from collm_tools.load.prompts import Prompt
from collm_tools.load.runner import Offer, run_load
from tests.support.waiting import eventually

QUESTION = Prompt((("user", "hello"),), "hi")


def word(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


FINAL = {
    "choices": [],
    "usage": {"completion_tokens": 7},
    "collm": {"adapter": "desk@v2", "cross_entropy": 1.5, "reference_tokens": 3},
}


class Service:
    """Answers by the requested model's name; `release` lets the hanging answers end."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.active = 0
        self.release = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.seen.append(asked)
        match asked["model"]:
            case "full":
                return web.json_response({"error": {"message": "queue full"}}, status=429)
            case "broken":
                return web.Response(status=500, text="oops")
        return await self.stream(request, asked["model"])

    async def stream(self, request: web.Request, model: str) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.active += 1
        try:
            for chunk in self.chunks(model):
                await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            if model == "hang":
                await self.release.wait()
            await response.write(b"data: [1\n\n" if model == "garbled" else b"data: [DONE]\n\n")
        finally:
            self.active -= 1
        return response

    def chunks(self, model: str) -> list[dict[str, Any]]:
        match model:
            case "good":
                return [word("hel"), word("lo"), word("", "stop"), FINAL]
            case "shed":
                return [word("a"), {"error": {"message": "too late", "code": "rejected-ttl-expired"}}]
            case "lost":
                return [word("a"), {"error": {"message": "replica gone", "code": "unavailable"}}]
        return [word("a")]


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, str]]:
    behind = Service()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", behind.answer)
    async with TestServer(app) as server:
        yield behind, str(server.make_url(""))
        behind.release.set()


def target(url: str, model: str, **changes: Any) -> Target:
    return Target(url=url, model=model, slo=Slo(name="s", ttft_s=2.0), **changes)


async def send(url: str, model: str, **changes: Any) -> RequestRecord:
    (record,) = await run_load([Offer(0.0, QUESTION, 5)], target(url, model, **changes))
    return record


async def test_a_whole_answer_is_recorded_with_its_quality(service: tuple[Service, str]) -> None:
    """Catches chunks counted where the service says how many tokens there were, and a lost quality figure."""
    record = await send(service[1], "good")
    assert (record.outcome, record.text, record.output_tokens) == ("completed", "hello", 7)
    assert (record.adapter, record.cross_entropy, record.reference_tokens) == ("desk@v2", 1.5, 3)
    assert record.ttft_s is not None
    assert record.e2e_s is not None
    assert 0 < record.ttft_s <= record.e2e_s
    assert service[0].seen[0]["reference"] == "hi"


@pytest.mark.parametrize(
    ("model", "outcome", "error"),
    [
        ("full", "rejected", "queue full"),
        ("shed", "rejected", "too late"),
        ("broken", "failed", "oops"),
        ("lost", "failed", "replica gone"),
        ("cut", "failed", "without a finish reason"),
        ("garbled", "failed", "unreadable"),
    ],
)
async def test_every_other_end_has_its_outcome_and_reason(
    service: tuple[Service, str], model: str, outcome: str, error: str
) -> None:
    """Catches half an answer counted as a whole one, and refusals mixed up with failures."""
    record = await send(service[1], model)
    assert record.outcome == outcome
    assert error in record.error


async def test_an_answer_that_never_ends_times_out(service: tuple[Service, str]) -> None:
    """Catches a run that waits for ever for one request."""
    record = await send(service[1], "hang", timeout_s=0.2)
    assert (record.outcome, record.cancelled) == ("failed", False)
    assert "no end after 0.2 s" in record.error


async def test_leaving_closes_the_connection(service: tuple[Service, str]) -> None:
    """Catches a cancel that only the client knows about: the server would go on generating."""
    record = await send(service[1], "hang", cancel_after_s=0.2)
    assert (record.outcome, record.cancelled) == ("failed", True)
    service[0].release.set()
    await eventually(lambda: service[0].active == 0)


async def test_nobody_there_is_a_failure() -> None:
    """Catches a traceback when the service is down."""
    record = await send("http://127.0.0.1:9", "good")
    assert record.outcome == "failed"
    assert record.error


async def test_arrivals_do_not_wait_for_answers(service: tuple[Service, str]) -> None:
    """Catches a closed loop, which hides overload."""
    behind, url = service
    offers = [Offer(0.01 * n, QUESTION, 5) for n in range(5)]
    run = asyncio.create_task(run_load(offers, target(url, "hang")))
    await eventually(lambda: behind.active == 5)
    behind.release.set()
    assert [record.at_s for record in await run] == [offer.at_s for offer in offers]


async def test_requests_over_the_bound_are_counted_as_failed(service: tuple[Service, str]) -> None:
    """Catches offers that silently never happen."""
    behind, url = service
    told: list[RequestRecord] = []

    def on_done(record: RequestRecord) -> None:
        told.append(record)
        behind.release.set()

    offers = [Offer(0.0, QUESTION, 5) for _ in range(4)]
    records = await run_load(offers, target(url, "hang"), max_in_flight=2, on_done=on_done)
    assert len(records) == len(told) == 4
    assert sum("not sent" in record.error for record in records) == 2
    assert all(record.outcome == "failed" for record in records)


async def test_a_stopped_run_leaves_no_request_behind(service: tuple[Service, str]) -> None:
    """Catches connections that outlive Ctrl-C."""
    behind, url = service
    run = asyncio.create_task(run_load([Offer(0.0, QUESTION, 5)], target(url, "hang")))
    await eventually(lambda: behind.active == 1)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    behind.release.set()
    await eventually(lambda: behind.active == 0)


def test_a_named_class_goes_by_name_and_limits_in_milliseconds() -> None:
    """Catches seconds sent where milliseconds are read."""
    assert body(target("u", "m"), QUESTION, 5)["slo"] == {"ttft_ms": 2000.0}
    assert body(target("u", "m", slo_class="chat"), QUESTION, 5)["slo"] == "chat"
    free = Target(url="u", model="m", slo=Slo(name="free"))
    assert "slo" not in body(free, Prompt((("user", "x"),)), 5)


def test_the_ingress_reads_what_the_client_sends() -> None:
    """Catches an extension field that the two sides spell or measure differently."""
    known = objectives.classes({"chat": {"ttft_s": 1.5}})

    def read(asked: Target) -> tuple[ChatBody, Slo]:
        found = parse(ChatBody, json.dumps(body(asked, QUESTION, 5)).encode())
        return found, objectives.choose(known, {}, found.slo)

    own, own_slo = read(target("u", "m", ignore_eos=True))
    assert (own.model, own.reference, own.limit, own.ignore_eos, own.stream) == ("m", "hi", 5, True, True)
    assert (own_slo.ttft_s, own_slo.tpot_s, own_slo.e2e_s) == (2.0, None, None)
    assert own.conversation() == [{"role": "user", "content": "hello"}]
    assert read(target("u", "m", slo_class="chat"))[1].ttft_s == 1.5
