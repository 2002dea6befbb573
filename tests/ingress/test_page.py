"""The live page's feed and files over HTTP, against a real broker with planted state."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from collm_common.broker import connect
from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_dispatcher.ingress.page import routes
from collm_dispatcher.ingress.service import ingress
from tests.dispatcher.support import dispatcher_settings
from tests.ingress import planted
from tests.ingress.support import chat, front
from tests.support.broker import Broker
from tests.support.waiting import eventually

STATIC = resources.files(routes.__package__) / "static"


@asynccontextmanager
async def page(redis: Redis, folder: Path, **changes: Any) -> AsyncIterator[aiohttp.ClientSession]:
    """An ingress without replicas of its own."""
    settings = dispatcher_settings(models={"m": str(folder)}, host="127.0.0.1", port=0, **changes)
    async with (
        ingress(settings, redis, SystemClock()) as running,
        aiohttp.ClientSession(f"http://127.0.0.1:{running.port}") as http,
    ):
        yield http


async def state(http: aiohttp.ClientSession) -> dict[str, Any]:
    async with http.get("/live/state") as response:
        assert response.status == 200
        return dict(await response.json())


async def event(stream: aiohttp.ClientResponse) -> Any:
    async with asyncio.timeout(10):
        while True:
            line = (await stream.content.readline()).decode()
            assert line, "the stream ended"
            if line.startswith("data: "):
                return json.loads(line.removeprefix("data: "))


async def test_the_feed_tells_what_is_in_the_broker(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A figure of another replica, stream, job or version than the one that it stands beside."""
    await planted.plant(redis, keys, time.time())
    async with page(redis, tokenizer_folder, slo_classes={"chat": {"ttft_s": 0.5}}) as http:
        view = await state(http)
    assert [(r["id"], r["state"], r["alive"], r["sent"]) for r in view["replicas"]] == [
        ("r1", "combined", True, 1),
        ("r2", "combined", True, 0),
        ("r3", "combined", False, 0),
    ]
    one, _, dead = view["replicas"]
    assert (one["limit"], one["train"], one["versions"]) == (4, 2, {"desk": "2.4"})
    assert dead["utilisation"] is None
    assert len(one["load"]) == planted.REPORTS
    assert [(s["name"], s["waiting"], (s["limits"] or {}).get("ttft_s")) for s in view["streams"]] == [
        ("chat", 2, 0.5),
        ("default", 0, None),
    ]
    (adapter,) = view["adapters"]
    assert (adapter["version"], adapter["holders"]) == (2, {"2": ["r2", "r3"], "2.4": ["r1"]})
    assert [(v["version"], v["after"]) for v in adapter["published"]] == [(1, 3.1), (2, 2.4)]
    (job,) = view["jobs"]
    assert (job["adapter"], job["status"], job["round"], sorted(job["losses"])) == (
        "desk",
        "training",
        3,
        ["r1", "r2", "r3"],
    )
    assert [(r["version"], r["published"], r["held_out"]) for r in job["rounds"]] == [
        (1, True, pytest.approx(3.1)),
        (2, True, pytest.approx(2.4)),
    ]
    assert [span["state"] for span in view["lanes"]["r3"]] == ["serving", "idle", "combined", "away"]
    assert view["fits"][0]["error"] == pytest.approx(0, abs=0.06)
    assert list(view["fits"][0]["lines"]) == ["0", "2"]
    assert view["news"][0]["text"] == "r3: down (its lease ran out)"
    assert view["tokens_per_s"] > 0


async def test_damaged_keys_leave_the_page_what_can_be_read(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A page that is gone, or whose stream ends, while somebody looks for what is wrong with the cell."""
    await planted.plant(redis, keys, time.time())
    async with page(redis, tokenizer_folder) as http, http.get("/live/stream") as stream:
        jobs = [key.decode() async for key in redis.scan_iter(keys.job("*"))]
        damaged = (keys.events, keys.telemetry, keys.subflow("r1"), keys.requests("m", "chat"), keys.streams, *jobs)
        for key in damaged:
            await redis.set(key, "x")
            async with asyncio.timeout(10):
                while (view := await event(stream)) is None:
                    pass
            assert [replica["id"] for replica in view["replicas"]] == ["r1", "r2", "r3"], key
        assert len((await state(http))["replicas"]) == 3


async def test_an_empty_cell_has_a_page(redis: Redis, tokenizer_folder: Path) -> None:
    """A crash before the first replica is there."""
    async with page(redis, tokenizer_folder) as http:
        view = await state(http)
    assert (view["replicas"], view["jobs"], view["lanes"], view["tokens_per_s"]) == ([], [], {}, 0)


async def test_served_requests_are_told_by_stream(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """Attainment read from a metric that has been renamed, or shown under another class."""
    async with front(redis, keys, tokenizer_folder, slo_classes={"chat": {"e2e_s": 60}}) as running:
        for objective in ("chat", {"e2e_ms": 50_000}):
            status, _ = await running.post("/v1/chat/completions", chat(slo=objective))
            assert status == 200
        _, view = await running.get("/live/state")
    streams = {s["name"]: s for s in view["streams"]}
    for name in ("chat", "other"):
        figures = {key: streams[name][key] for key in ("offered", "attainment", "goodput_tokens")}
        assert figures == {"offered": 1, "attainment": 1.0, "goodput_tokens": 6}
    assert streams["default"]["offered"] is None


async def test_many_viewers_cost_the_broker_what_one_does(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A broker that is asked again for every open browser, or while nobody looks."""
    await planted.plant(redis, keys, time.time())
    async with page(redis, tokenizer_folder) as http:
        await redis.config_resetstat()
        assert "cmdstat_xrevrange" not in await redis.info("commandstats")
        await asyncio.gather(*(state(http) for _ in range(20)))
        calls = (await redis.info("commandstats"))["cmdstat_xrevrange"]["calls"]
    assert calls <= 4


async def test_the_stream_follows_the_cell(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A page that stands still after its first picture."""
    async with page(redis, tokenizer_folder) as http, http.get("/live/stream") as stream:
        assert stream.content_type == "text/event-stream"
        assert (await event(stream))["replicas"] == []
        await planted.plant(redis, keys, time.time())
        async with asyncio.timeout(10):
            while len((await event(stream))["replicas"]) < 3:
                pass


async def test_a_viewer_that_leaves_makes_room(
    redis: Redis, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams without a bound, or a bound that closed browsers use up."""
    monkeypatch.setattr(routes, "MOST_VIEWERS", 1)
    async with page(redis, tokenizer_folder) as http:
        async with http.get("/live/stream") as first, http.get("/live/stream") as second:
            await event(first)
            assert second.status == 429
            first.close()

        async def room() -> bool:
            async with http.get("/live/stream") as again:
                return again.status == 200

        await eventually(room)


async def test_a_lost_broker_is_told_and_survived(tokenizer_folder: Path) -> None:
    """A page that shows old figures as if they were new, or a stream that never comes back."""
    server = Broker()
    server.start()
    redis = connect(server.url)
    try:
        async with page(redis, tokenizer_folder) as http, http.get("/live/stream") as stream:
            assert await event(stream) is not None
            server.stop()
            while await event(stream) is not None:
                pass
            server.start()
            while await event(stream) is None:
                pass
    finally:
        await redis.aclose()
        server.close()


async def test_files_are_served_for_browsers_and_nothing_else_is(redis: Redis, tokenizer_folder: Path) -> None:
    """A file missing from the package, a page that may be framed, or a path that leads out of the folder."""
    async with page(redis, tokenizer_folder) as http:
        for path, type_ in (("/", "text/html"), ("/live/page.css", "text/css"), ("/live/page.js", "text/javascript")):
            async with http.get(path) as response:
                assert (response.status, response.content_type) == (200, type_)
                policy = response.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "frame-ancestors 'none'" in policy
        for path in ("/live/routes.py", "/live/..%2froutes.py", "/live/%2e%2e/settings.py", "/live/page.html"):
            async with http.get(path) as response:
                assert response.status == 404


async def test_the_page_can_be_switched_off(redis: Redis, tokenizer_folder: Path) -> None:
    """An operator who wants nothing shown and cannot have it."""
    async with page(redis, tokenizer_folder, live_page=False) as http:
        for path in ("/", "/live/state", "/live/stream", "/live/page.js"):
            async with http.get(path) as response:
                assert response.status == 404


def test_nothing_comes_from_elsewhere() -> None:
    """A page that needs the internet."""
    for name in ("page.html", *routes.FILES):
        text = (STATIC / name).read_text()
        links = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[\w/.]*", text)) - {"http://www.w3.org/2000/svg"}
        assert links == set(), name
