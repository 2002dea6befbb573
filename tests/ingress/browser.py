"""A headless Chromium of this machine; nothing is downloaded."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from playwright.async_api import Browser, Page, async_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WITHIN_MS = 20_000.0


def chromium() -> str:
    """Where it is: COLLM_TEST_CHROMIUM, or on the path; "" if it is nowhere."""
    found = (shutil.which(name) for name in NAMES)
    return os.environ.get("COLLM_TEST_CHROMIUM") or next((path for path in found if path), "")


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    """A fresh one."""
    # Chromium cannot set its sandbox up for root, nor in most containers.
    arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    async with async_playwright() as driver:
        running = await driver.chromium.launch(executable_path=chromium(), args=arguments, timeout=2 * WITHIN_MS)
        try:
            yield running
        finally:
            await running.close()


@asynccontextmanager
async def opened(
    running: Browser, url: str, width: int = 1280, scheme: Literal["light", "dark"] = "light"
) -> AsyncIterator[tuple[Page, list[str]]]:
    """The page once it is drawn, and everything that its console complains of."""
    trouble: list[str] = []
    page = await running.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(WITHIN_MS)
    page.on("console", lambda message: trouble.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: trouble.append(str(error)))
    try:
        await page.goto(url)
        await page.wait_for_selector("main[data-ready=yes]")
        yield page, trouble
    finally:
        await page.close()
