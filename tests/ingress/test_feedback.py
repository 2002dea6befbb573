"""Feedback on answers: it reaches the replica that served, of the right tenant, and can be taken back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from collm_common.clock import ManualClock
from collm_common.keys import Keys
from collm_dispatcher.ingress.recent import Kept, Recent
from collm_replica.data_endpoint import DataEndpoint
from collm_replica.finetune.records import Record, check_text, parse
from tests.ingress.support import Front, chat, front, text
from tests.ingress.tuning import no_digest
from tests.support.scan import assert_not_in_redis
from tests.support.waiting import eventually

FEEDBACK = "/v1/feedback"
CANARY = "heron-canary-5521"
TENANT = {"x-llm-d-inference-fairness-id": ".."}


@asynccontextmanager
async def cell(redis: Redis, keys: Keys, tokenizer: Path, data: Path, **changes: Any) -> AsyncIterator[Front]:
    """Two replicas, each with a data endpoint over `data`/r1 and `data`/r2."""
    async with AsyncExitStack() as stack:
        site = await stack.enter_async_context(front(redis, keys, tokenizer, replicas=2, **changes))
        for id_ in site.replicas:
            endpoint = DataEndpoint(data / id_, 1 << 20, check_text, no_digest, lambda: "")
            port = await endpoint.start("127.0.0.1", 0)
            stack.push_async_callback(endpoint.close)
            await redis.hset(keys.replica(id_), "data_url", f"http://127.0.0.1:{port}")
        await eventually(lambda: _deletes(site, 200))
        yield site


async def _deletes(site: Front, status: int) -> bool:
    async with site.http.delete(f"{FEEDBACK}/some-answer") as reply:
        return reply.status == status


def stored(data: Path) -> dict[str, list[Record]]:
    """Samples by file."""
    return {str(path.relative_to(data)): parse(path.read_text()) for path in data.rglob("*.jsonl")}


async def test_a_better_answer_is_stored_where_the_request_was_served_and_can_be_taken_back(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Training text that goes through the broker or to another replica, leaves its folder, or cannot be deleted."""
    async with cell(redis, keys, tokenizer_folder, tmp_path) as site:
        _, answer = await site.post("/v1/chat/completions", chat("why?"), headers=TENANT)
        said = {"id": answer["id"], "answer": CANARY, "rating": "bad"}
        assert (await site.post(FEEDBACK, said))[0] == 404, "another tenant's"
        status, told = await site.post(FEEDBACK, said, headers=TENANT)
        assert (status, told["stored"]) == (200, True)
        await site.post(FEEDBACK, said, headers=TENANT)
        ((path, records),) = stored(tmp_path).items()
        assert records == [Record((("user", "why?"),), CANARY)]
        replica, *folders, _ = Path(path).parts
        assert folders == ["feedback", "t-.."]
        assert replica in site.replicas
        await assert_not_in_redis(redis, CANARY.encode())

        async with site.http.delete(f"{FEEDBACK}/{answer['id']}") as reply:
            assert (await reply.json())["deleted"] is False
        for deleted in (True, False):
            async with site.http.delete(f"{FEEDBACK}/{answer['id']}", headers=TENANT) as reply:
                assert (reply.status, (await reply.json())["deleted"]) == (200, deleted)
        assert stored(tmp_path) == {}
        assert (await site.post(FEEDBACK, said, headers=TENANT))[0] == 404, "taken back for good"


async def test_ratings_keep_good_answers_and_drop_bad_ones(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """An answer that was called bad and is learnt, or a streamed one of which nothing is known."""
    async with cell(redis, keys, tokenizer_folder, tmp_path) as site:
        events = await site.stream("/v1/completions", text("abc"))
        whole = "".join(choice["text"] for event in events for choice in event["choices"])
        for rating, records in (("good", [Record((("user", "abc"),), whole, chat=False)]), ("bad", None)):
            status, told = await site.post(FEEDBACK, {"id": events[0]["id"], "rating": rating})
            assert (status, told["stored"]) == (200, rating == "good")
            assert list(stored(tmp_path).values()) == ([records] if records else [])
        metrics = await (await site.http.get("/metrics")).text()
        assert 'collm:feedback_total{kind="good"} 1.0' in metrics


@pytest.mark.parametrize(
    ("asked", "said", "param"),
    [
        ({}, {}, "answer"),
        ({}, {"answer": ""}, "answer"),
        ({}, {"rating": "superb"}, "rating"),
        ({}, {"answer": "\ud800"}, "body"),
        ({}, {"id": "chatcmpl-unknown", "rating": "good"}, "id"),
        ({}, {"id": "../../x", "rating": "good"}, "id"),
        ({"store": False}, {"rating": "good"}, "id"),
        ({"n": 2}, {"rating": "good"}, "id"),
        ({"messages": [{"role": "tool", "content": "x"}]}, {"rating": "good"}, "id"),
    ],
)
async def test_what_cannot_be_learnt_is_refused_by_field(
    redis: Redis,
    keys: Keys,
    tokenizer_folder: Path,
    tmp_path: Path,
    asked: dict[str, Any],
    said: dict[str, Any],
    param: str,
) -> None:
    """Feedback that is accepted and lost, on requests whose clients opted out, or outside of the folder."""
    async with cell(redis, keys, tokenizer_folder, tmp_path) as site:
        status, answer = await site.post("/v1/chat/completions", chat("why?") | asked)
        assert status == 200
        status, refusal = await site.post(FEEDBACK, {"id": answer["id"]} | said)
        assert (status, refusal["error"]["param"]) == (404 if param == "id" else 400, param)
        assert stored(tmp_path) == {}


async def test_data_of_a_replica_that_is_away_goes_nowhere_else(
    redis: Redis, keys: Keys, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Private text at a replica that never saw the request, or a deletion that is confirmed and did not happen."""
    async with cell(redis, keys, tokenizer_folder, tmp_path) as site:
        _, answer = await site.post("/v1/chat/completions", chat("why?"))
        for id_ in site.replicas:
            await redis.hset(keys.replica(id_), "data_url", "http://127.0.0.1:1")
        await eventually(lambda: _deletes(site, 503))
        assert (await site.post(FEEDBACK, {"id": answer["id"], "answer": "x"}))[0] == 503
        assert stored(tmp_path) == {}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400), st.floats(0, 20)), max_size=40))
def test_what_is_kept_for_feedback_stays_within_its_bounds(puts: list[tuple[int, int, float]]) -> None:
    """Memory that grows with every answer, or private text that stays longer than it was promised."""
    clock = ManualClock()
    recent, latest = Recent(4096, 30.0, clock), dict[str, Kept]()
    for name, chars, after_s in puts:
        clock.time_s += after_s
        kept = Kept("t", "r1", "a" * chars, "b", clock.monotonic())
        recent.put(str(name), kept)
        latest[str(name)] = kept
        held = [found for known in latest if (found := recent.find(known, "t")) is not None]
        assert len(held) == len(recent)
        assert sum(found.size for found in held) <= 4096
        assert all(found.at_s >= clock.monotonic() - 30.0 for found in held)
        assert recent.find(str(name), "t") == kept
        assert recent.find(str(name), "other") is None
