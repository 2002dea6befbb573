"""Every route as /openapi.json describes it, by a tester that makes its requests of the description."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis

from collm_common.keys import Keys
from tests.clients.cell import client_cell
from tests.clients.outside import needs, run
from tests.ingress.support import text

EXAMPLES = 20
# A description cannot say everything: a file of samples must be JSON lines, a path must be there.
SEMANTIC = "positive_data_acceptance"


@needs("schemathesis")
@pytest.mark.timeout(300)
async def test_no_request_breaks_what_the_description_says(
    redis: Redis, keys: Keys, model: Path, tmp_path: Path
) -> None:
    """An internal error, a body that is taken against its description, an answer that is none of those described."""
    async with client_cell(redis, keys, model, tmp_path) as site:
        url = f"http://127.0.0.1:{site.ingress.port}"
        options = ["--url", url, "--exclude-checks", SEMANTIC, "--max-examples", str(EXAMPLES), "--workers", "1"]
        options += ["--generation-deterministic", "--request-timeout", "40", "--no-color"]
        said = await run("schemathesis", "run", f"{url}/openapi.json", *options, folder=tmp_path)
        assert (await site.post("/v1/completions", text()))[0] == 200
        assert len(site.ingress.opened) == 0
    assert " passed" in said
