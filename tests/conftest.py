"""Fixtures shared by all tests: one real broker a session, emptied before each test that uses it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import settings
from redis.asyncio import Redis

from collm_common.broker import connect
from collm_common.keys import Keys
from tests.support.broker import Broker

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# The same examples in every run, so that a red run is a change's fault; HYPOTHESIS_PROFILE=explore draws new ones.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))


@pytest.fixture(scope="session")
def broker() -> Iterator[Broker]:
    """A running server."""
    server = Broker()
    server.start()
    yield server
    server.close()


@pytest.fixture
async def redis(broker: Broker) -> AsyncIterator[Redis]:
    """A client of the emptied server."""
    client = connect(broker.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def keys() -> Keys:
    """The default key names."""
    return Keys()
