"""A broker whose disk is full: it refuses every write until there is room again."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path

import pytest
from redis.asyncio import Redis

from collm_common.broker import connection, patiently
from collm_common.keys import Keys
from collm_dispatcher.ingress import courier
from tests.ingress.support import SLOW_S, Front, front, text
from tests.support.broker import Broker
from tests.support.waiting import eventually

TEXT = "/v1/completions"


async def test_clients_are_told_to_come_again_and_open_answers_go_on_once_there_is_room(
    keys: Keys, tokenizer_folder: Path
) -> None:
    """Requests that hang or fail for good, or services that must be restarted, because a disk was full for a while."""
    server = Broker()
    server.start()
    try:
        async with connection(server.url) as redis, front(redis, keys, tokenizer_folder, step_s=SLOW_S) as site:
            _, whole = await site.post(TEXT, text("abcd", max_tokens=60))
            open_ = asyncio.create_task(site.post(TEXT, text("abcd", max_tokens=60)))
            await eventually(lambda: any(len(one.tokens) > 5 for one in site.ingress.opened))
            server.fill_disk()
            try:
                await eventually(partial(_refused, site))
                assert not open_.done()
            finally:
                server.empty_disk()

            async def accepted() -> bool:
                return (await site.post(TEXT, text()))[0] == 200

            await eventually(accepted)
            status, body = await open_
            assert (status, body["choices"][0]["text"]) == (200, whole["choices"][0]["text"])
            loops = [*site.ingress.tasks, *site.dispatch.tasks]
            assert not any(task.done() for task in loops)
    finally:
        server.close()


async def test_a_lease_that_ran_out_on_a_full_disk_is_no_lost_broker(
    keys: Keys, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every open answer computed a second time because its ingress could not renew its lease for a minute."""
    monkeypatch.setattr(courier, "LEASE_S", 1.5)
    server = Broker()
    server.start()
    try:
        async with connection(server.url) as redis, front(redis, keys, tokenizer_folder, step_s=0.1) as site:
            open_ = asyncio.create_task(site.post(TEXT, text("abcd", max_tokens=90)))
            await eventually(lambda: any(len(one.tokens) > 5 for one in site.ingress.opened))
            await eventually(lambda: redis.keys(keys.lease("ingress-*")))
            server.fill_disk()
            try:
                await eventually(partial(_gone, redis, keys.lease("ingress-*")))
            finally:
                server.empty_disk()
            await eventually(lambda: redis.keys(keys.lease("ingress-*")))
            assert (await open_)[0] == 200
            async with site.http.get("/metrics") as page:
                assert 'collm:requests_redispatched_total{model_name="m"} ' not in await page.text()
    finally:
        server.close()


async def _gone(redis: Redis, pattern: str) -> bool:
    """A connection that is old is tried by a PING, which Redis refuses too."""
    return not await patiently(partial(redis.keys, pattern), 10.0)


async def _refused(site: Front) -> bool:
    """Whether a client is told to come again; one that was accepted just before the disk was full waits, and leaves."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2), site.http.post(TEXT, json=text()) as response:
            return response.status == 503 and int(response.headers["Retry-After"]) >= 1
    return False
