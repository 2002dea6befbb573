"""The live page in a real browser, drawn from planted state."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest
from redis.asyncio import Redis

from collm_common import post
from collm_common.clock import SystemClock
from collm_common.keys import Keys
from collm_common.messages import StateChanged
from collm_common.registry import Registry
from collm_common.types import ReplicaState
from collm_dispatcher.ingress.service import ingress
from tests.dispatcher.support import dispatcher_settings
from tests.ingress import planted

pytest.importorskip("playwright", reason="playwright is not installed")
from tests.ingress.browser import browser, chromium, opened

pytestmark = pytest.mark.skipif(not chromium(), reason="no Chromium on this machine (COLLM_TEST_CHROMIUM names one)")

LEGIBLE = (Path(__file__).parent / "legible.js").read_text()
SIZES: list[tuple[int, Literal["light", "dark"]]] = [(1280, "light"), (390, "dark"), (800, "light")]


@asynccontextmanager
async def url(redis: Redis, folder: Path) -> AsyncIterator[str]:
    """Of a page over planted state."""
    classes: dict[str, dict[str, float | str]] = {"chat": {"ttft_s": 0.5, "tpot_s": 0.05}}
    settings = dispatcher_settings(models={"m": str(folder)}, host="127.0.0.1", port=0, slo_classes=classes)
    async with ingress(settings, redis, SystemClock()) as running:
        yield f"http://127.0.0.1:{running.port}/"


async def test_the_page_shows_the_cell_and_follows_it(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A blank part, a script error, a forbidden style, markup out of an event, a page that stands still."""
    now_s = time.time()
    await planted.plant(redis, keys, now_s)
    async with url(redis, tokenizer_folder) as at, browser() as running, opened(running, at) as (page, trouble):
        assert await page.locator(".replica").count() == 3
        assert await page.locator(".replica .badge").all_inner_texts() == ["combined", "combined", "away"]
        assert await page.locator("#timeline .lane:not(.axis)").count() == 3
        assert await page.locator(".job .rounds tbody tr").count() == 2
        assert await page.locator(".job .plot path.line").count() == 3
        assert await page.locator(".fit .dot").count() > 6
        assert "held-out cross-entropy 3.100 → 2.400" in await page.inner_text("#adapters")
        assert "2 waiting" in await page.inner_text("#glance")
        assert await page.inner_text("#link") == "live"
        reason = "<img src=x onerror=alert(1)>"
        await Registry(redis, keys).transition("r1", ReplicaState.COMBINED, ReplicaState.SERVING, reason, now_s)
        await page.locator("#news").get_by_text(f"r1: combined -> serving ({reason})", exact=True).wait_for()
        assert await page.locator("#news img").count() == 0
        await page.locator(".replica").first.get_by_text("serving", exact=True).wait_for()
        assert trouble == []


async def test_the_page_can_be_read(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """Text too pale for its ground, parts that lie over each other or run out of the window, on a phone above all."""
    await planted.plant(redis, keys, time.time())
    async with url(redis, tokenizer_folder) as at, browser() as running:
        for width, scheme in SIZES:
            async with opened(running, at, width, scheme) as (page, _):
                found = await page.evaluate(LEGIBLE)
                assert found == {"pale": [], "cut": [], "overlapping": [], "wider": False}, (width, scheme)


async def test_what_is_read_or_reached_by_key_stays_in_place(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A page that is made anew each second: selections vanish, screen readers start again."""
    await planted.plant(redis, keys, time.time())
    async with url(redis, tokenizer_folder) as at, browser() as running, opened(running, at) as (page, _):
        await page.evaluate("window.first = document.querySelector('.replica h3')")
        event = StateChanged(
            replica="r2", before=ReplicaState.COMBINED, after=ReplicaState.IDLE, reason="new", time_s=time.time()
        )
        await post.event(redis, keys, event, "r2")
        await page.locator("#news").get_by_text("r2: combined -> idle (new)").wait_for()
        assert await page.evaluate("window.first === document.querySelector('.replica h3')")
