"""A cell with a tiny model that computes, spoken to by clients from PyPI."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from collm_common.keys import Keys
from tests.ingress.real import real_front
from tests.support.models import tiny_model_folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of model `m`."""
    return tiny_model_folder(tmp_path_factory.mktemp("clients"), "llama")


@pytest.fixture
async def url(redis: Redis, keys: Keys, model: Path) -> AsyncIterator[str]:
    """Where the API is."""
    async with real_front(redis, keys, model) as (site, _):
        yield f"http://127.0.0.1:{site.ingress.port}/v1"
