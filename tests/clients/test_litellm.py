"""LiteLLM as a program of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys

import pytest

SCRIPT = """
import json, sys, litellm
asked = dict(model="openai/m", api_base=sys.argv[1], api_key="none", max_tokens=8, seed=1, num_retries=0)
asked["messages"] = [{"role": "user", "content": "hi"}]
whole = litellm.completion(**asked)
chunks = list(litellm.completion(**asked, stream=True, stream_options={"include_usage": True}))
try:
    litellm.completion(**{**asked, "model": "openai/none"})
    refusal = ""
except litellm.NotFoundError as error:
    refusal = type(error).__name__
print(json.dumps({
    "whole": whole.choices[0].message.content,
    "tokens": whole.usage.completion_tokens,
    "streamed": "".join(c.choices[0].delta.content or "" for c in chunks if c.choices),
    "refusal": refusal,
}))
"""


@pytest.mark.skipif(importlib.util.find_spec("litellm") is None, reason="litellm is not installed")
async def test_litellm_gets_answers_streams_and_errors(url: str) -> None:
    """A proxy that many put before their models and that reads every field of an answer."""
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        SCRIPT,
        url,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    async with asyncio.timeout(90):
        out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    said = json.loads(out.decode().splitlines()[-1])
    assert said["tokens"] == 8
    assert said["whole"] == said["streamed"]
    assert said["refusal"] == "NotFoundError"
