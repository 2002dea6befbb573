"""OpenAI's own SDK: what it sends is understood, and what it reads is there."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from redis.asyncio import Redis

from collm_common.keys import Keys
from tests.ingress.tuning import LINES, tuning_cell
from tests.support.waiting import eventually

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "hi"}]
SAMPLED: dict[str, Any] = {"model": "m", "messages": MESSAGES, "max_completion_tokens": 12, "seed": 1}


@pytest.fixture
async def client(url: str) -> AsyncIterator[Any]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as made:
        yield made


async def test_models_are_listed_and_found(client: Any) -> None:
    """An entry without a field that the SDK's type needs."""
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).owned_by == "collm"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("none")


async def test_a_chat_and_its_stream_say_the_same(client: Any) -> None:
    """A stream whose chunks the SDK cannot put together, or whose usage is missing."""
    whole = await client.chat.completions.create(**SAMPLED)
    stream = await client.chat.completions.create(**SAMPLED, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"


async def test_every_sampling_field_is_understood(client: Any) -> None:
    """A field of the reference that is refused, or taken and without effect."""
    found = await client.chat.completions.create(
        **SAMPLED,
        n=2,
        temperature=0.9,
        top_p=0.95,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={"7": 100},
        logprobs=True,
        top_logprobs=3,
        stop=["\x00\x00\x00"],
        user="someone",
    )
    assert [choice.index for choice in found.choices] == [0, 1]
    for choice in found.choices:
        assert len(choice.logprobs.content) == found.usage.completion_tokens / 2
        assert len(choice.logprobs.content[0].top_logprobs) == 3
    assert found.choices[0].logprobs.content[0].token == "("


class Pet(BaseModel):
    """What the parsed answer must be."""

    kind: Literal["cat", "dog"]
    legs: Literal[3, 4]


async def test_structured_output_is_parsed(client: Any) -> None:
    """JSON that the SDK's own parser refuses."""
    pytest.importorskip("llguidance")
    asked = {**SAMPLED, "max_completion_tokens": 90}
    found = await client.chat.completions.parse(**asked, response_format=Pet)
    assert isinstance(found.choices[0].message.parsed, Pet)
    free = await client.chat.completions.create(
        **asked, response_format={"type": "json_schema", "json_schema": {"name": "any", "schema": {"enum": [1, 2]}}}
    )
    assert json.loads(free.choices[0].message.content) in (1, 2)


async def test_completions_take_prompts_and_tokens(client: Any) -> None:
    """The older endpoint: echo, several prompts, log-probabilities."""
    found = await client.completions.create(model="m", prompt=["ab", "cd"], max_tokens=4, echo=True)
    assert [choice.text[:2] for choice in found.choices] == ["ab", "cd"]
    tokens = await client.completions.create(model="m", prompt=[1, 2, 3], max_tokens=4, logprobs=2, temperature=0)
    assert len(tokens.choices[0].logprobs.token_logprobs) == 4
    scored = await client.completions.create(model="m", prompt="abc", max_tokens=0, logprobs=1, echo=True)
    assert [p is None for p in scored.choices[0].logprobs.token_logprobs] == [True, False, False]
    stream = await client.completions.create(model="m", prompt="ab", max_tokens=4, stream=True)
    assert [chunk.choices[0].finish_reason async for chunk in stream][-1] in ("length", "stop")


async def test_errors_are_the_sdks_own(client: Any) -> None:
    """A refusal that the SDK takes for something else, or that does not name its field."""
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(**{**SAMPLED, "model": "none"})
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(**SAMPLED, temperature=11)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await client.completions.create(model="m", prompt=[1] * 200, max_tokens=4)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as tools:
        await client.chat.completions.create(
            **SAMPLED, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]
        )
    assert tools.value.code == "unsupported_parameter"


async def test_files_and_fine_tuning_jobs(redis: Redis, keys: Keys, model: Path, tmp_path: Path) -> None:
    """A job object without a field that the SDK's type needs, or pages that it cannot turn."""
    async with tuning_cell(redis, keys, model, tmp_path) as (site, _):
        base = f"http://127.0.0.1:{site.ingress.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=30) as client:
            file = await client.files.create(file=("d.jsonl", "\n".join(LINES).encode()), purpose="fine-tune")
            assert (await client.files.retrieve(file.id)).status == "processed"
            assert [each.id async for each in client.files.list()] == [file.id]
            jobs = client.fine_tuning.jobs
            job = await jobs.create(
                model="m", training_file=file.id, suffix="sdk", method={"type": "supervised"}, metadata={"a": "b"}
            )

            async def succeeded() -> bool:
                return bool((await jobs.retrieve(job.id)).status == "succeeded")

            await eventually(succeeded)
            assert (await jobs.retrieve(job.id)).fine_tuned_model == "m-sdk@v2"
            assert [each.id async for each in jobs.list(limit=1)] == [job.id]
            events = [each.id async for each in jobs.list_events(job.id, limit=2)]
            assert len(events) == len(set(events)) > 4
            assert (await jobs.cancel(job.id)).status == "succeeded"
            made = [each.fine_tuned_model_checkpoint async for each in jobs.checkpoints.list(job.id, limit=1)]
            assert made == ["m-sdk@v2", "m-sdk@v1"]
            other = await jobs.create(model="m", training_file=file.id, suffix="rests")
            assert (await jobs.pause(other.id)).status == "paused"
            await jobs.resume(other.id)
            assert (await client.files.content(file.id)).text == "\n".join(LINES)
            assert (await client.files.delete(file.id)).deleted
            assert [each.id async for each in client.files.list(purpose="fine-tune", order="asc")] == []
            with pytest.raises(openai.NotFoundError):
                await jobs.retrieve("none")
