"""Load generators: what they send is understood, and what they measure is what was served."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from collm_common.keys import Keys
from tests.clients.cell import client_cell
from tests.clients.outside import needs, run
from tests.ingress.support import Front

REQUESTS, INPUT, OUTPUT = 20, 30, 12
TEMPLATE_TOKENS = 19
"""What the tiny model's chat template adds to one message."""

pytestmark = pytest.mark.timeout(300)


async def served(site: Front) -> dict[str, float]:
    """Prompt and output tokens, and whole answers, as the ingress counted them."""
    async with site.http.get("/metrics") as response:
        page = await response.text()
    found = re.findall(r"collm:(prompt_tokens|generation_tokens|request_success)_total{.*} (\S+)", page)
    return {name: float(value) for name, value in found}


def saw_all(counts: dict[str, float], prompt_tokens: float, output_tokens: float) -> None:
    """The client's mean token counts are those of the server; a readiness probe may come on top of the requests."""
    assert output_tokens == OUTPUT
    assert prompt_tokens == INPUT + TEMPLATE_TOKENS
    assert counts["generation_tokens"] >= REQUESTS * OUTPUT
    assert counts["prompt_tokens"] >= REQUESTS * prompt_tokens


@needs("guidellm")
async def test_guidellm_measures_what_was_served(redis: Redis, keys: Keys, model: Path, tmp_path: Path) -> None:
    """Requests that count as failed, answers of another length than was asked for, latencies of nothing."""
    async with client_cell(redis, keys, model, tmp_path) as site:
        arguments = {
            "backend": f"kind=openai_http,target=http://127.0.0.1:{site.ingress.port},model=m",
            "profile": "kind=concurrent,streams=4",
            "constraint": f"kind=max_requests,count={REQUESTS}",
            "tokenizer": f"kind=hf_auto,model={model}",
            "data": f"kind=synthetic_text,prompt_tokens={INPUT},output_tokens={OUTPUT}",
            "output": "kind=json,path=report.json",
        }
        options = [text for name, value in arguments.items() for text in (f"--{name}", value)]
        await run("guidellm", "run", *options, "--disable-console", folder=tmp_path, HF_HUB_OFFLINE="1")
        counts = await served(site)
    found: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]["metrics"]
    totals = found["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    means = {
        name: found[name]["successful"]["mean"]
        for name in ("prompt_token_count", "output_token_count", "time_to_first_token_ms", "inter_token_latency_ms")
    }
    saw_all(counts, means["prompt_token_count"], means["output_token_count"])
    assert means["time_to_first_token_ms"] > 0
    assert means["inter_token_latency_ms"] > 0


@needs("aiperf")
async def test_aiperf_measures_what_was_served(redis: Redis, keys: Keys, model: Path, tmp_path: Path) -> None:
    """The same, by the fields and the usage that another tool reads."""
    async with client_cell(redis, keys, model, tmp_path) as site:
        arguments = {
            "model": "m",
            "url": f"http://127.0.0.1:{site.ingress.port}",
            "endpoint-type": "chat",
            "tokenizer": str(model),
            "request-count": str(REQUESTS),
            "concurrency": "4",
            "synthetic-input-tokens-mean": str(INPUT),
            "output-tokens-mean": str(OUTPUT),
            "extra-inputs": "ignore_eos:true",
            "artifact-dir": str(tmp_path / "report"),
            "ui": "none",
        }
        options = [text for name, value in arguments.items() for text in (f"--{name}", value)]
        await run("aiperf", "profile", *options, "--streaming", "--use-server-token-count", folder=tmp_path)
        counts = await served(site)
    found: dict[str, Any] = json.loads((tmp_path / "report/profile_export_aiperf.json").read_text())
    assert (found["request_count"]["avg"], found["error_summary"]) == (REQUESTS, [])
    saw_all(counts, found["input_sequence_length"]["avg"], found["output_sequence_length"]["avg"])
    assert found["output_sequence_length"]["std"] == 0
    assert found["time_to_first_token"]["min"] > 0
    assert found["inter_token_latency"]["avg"] > 0
