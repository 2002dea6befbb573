"""Several choices and several prompts in one HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from collm_common import messages, streams
from collm_common.keys import Keys
from collm_common.messages import Request
from collm_common.types import SamplingParams
from collm_dispatcher.ingress.merge import merged
from tests.dispatcher.support import register
from tests.ingress.real import real_front
from tests.ingress.support import SLOW_S, chat, front, text
from tests.support.models import tiny_model_folder
from tests.support.waiting import eventually

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def texts(chunks: list[dict[str, Any]], index: int) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


async def test_every_prompt_has_n_choices_in_order(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """Choices told under the wrong index, a prompt's tokens counted once a choice, and usage of one choice only."""
    async with front(redis, keys, tokenizer_folder) as site:
        _, whole = await site.post(TEXT, text(["abc", [1, 2]], n=2))
        chunks = await site.stream(TEXT, text(["abc", [1, 2]], n=2, stream_options={"include_usage": True}))
        _, alone = await site.post(TEXT, text("abc"))
        _, other = await site.post(TEXT, text([1, 2]))
    told = [choice["text"] for choice in whole["choices"]]
    assert told == [alone["choices"][0]["text"]] * 2 + [other["choices"][0]["text"]] * 2
    assert [texts(chunks, index) for index in range(4)] == told
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    ends = [c["choices"][0]["index"] for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]
    counts = {"prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29}
    assert whole["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}} == chunks[-1]["usage"]


async def test_each_choice_of_a_chat_opens_with_its_role(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """SDKs that build messages from chunks get a choice without a role."""
    async with front(redis, keys, tokenizer_folder) as site:
        chunks = await site.stream(CHAT, chat(n=3))
    opened = [c["choices"][0]["index"] for c in chunks if c["choices"][0]["delta"].get("role") == "assistant"]
    assert sorted(opened) == [0, 1, 2]


async def test_choices_differ_and_the_first_is_that_of_a_single_one(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """The same answer n times, or n changing the answer that a seed stands for."""
    await register(redis, keys)
    async with front(redis, keys, tokenizer_folder, replicas=0) as site:
        asked = asyncio.create_task(site.post(TEXT, text(n=3, seed=7, temperature=1, logit_bias={"5": 1})))
        await eventually(lambda: _count(redis, keys.subflow("r1"), 3))
        entries = streams.parse("", await redis.xrange(keys.subflow("r1")))
        asked.cancel()
    found = [message.sampling for entry in entries if isinstance(message := messages.decode(entry.data), Request)]
    assert [params.seed for params in found] == [7, 8, 9]
    assert all(isinstance(params, SamplingParams) and params.logit_bias == ((5, 1.0),) for params in found)


async def _count(redis: Redis, key: str, wanted: int) -> bool:
    return int(await redis.xlen(key)) == wanted


async def test_too_many_choices_leave_nothing_behind(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """Half of the choices accepted, and places in the queue that nobody gives back."""
    async with front(redis, keys, tokenizer_folder, max_open=3) as site:
        refused = await site.post(TEXT, text(n=4))
        many = await site.post(TEXT, text(["a", "b"], n=65))
        quality = await site.post(TEXT, text(n=2, reference="abc"))
        assert len(site.ingress.opened) == 0
        served = await site.post(TEXT, text(n=3))
    assert refused[0] == 429
    assert (many[0], many[1]["error"]["param"]) == (400, "n")
    assert (quality[0], quality[1]["error"]["param"]) == (400, "reference")
    assert served[0] == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_all_its_choices(
    redis: Redis, keys: Keys, tokenizer_folder: Path, stream: bool
) -> None:
    """Tokens made for nobody by every choice but the first."""
    async with front(redis, keys, tokenizer_folder, step_s=SLOW_S) as site:
        engine = site.replicas["r1"].engine
        asked = asyncio.create_task(site.post(TEXT, text(n=3, max_tokens=200, stream=stream)))
        await eventually(lambda: engine.running == 3)
        asked.cancel()
        await eventually(lambda: not engine.has_work, 2)
        assert len(site.ingress.opened) == 0


async def test_an_echo_stands_before_every_answer(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A prompt echoed once for all choices, or not decoded when it came as tokens."""
    async with front(redis, keys, tokenizer_folder) as site:
        _, plain = await site.post(TEXT, text(["abc", [1, 2]]))
        _, whole = await site.post(TEXT, text(["abc", [1, 2]], echo=True))
        chunks = await site.stream(TEXT, text(["abc", [1, 2]], echo=True))
    first, second = ((b["choices"][i]["text"], a["choices"][i]["text"]) for a, b in [(plain, whole)] for i in (0, 1))
    assert first[0] == "abc" + first[1]
    assert second[0].endswith(second[1])
    assert len(second[0]) > len(second[1])
    assert [texts(chunks, 0), texts(chunks, 1)] == [first[0], second[0]]


async def test_an_echo_has_its_own_log_probabilities(
    redis: Redis, keys: Keys, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A harness that scores texts by what stands at each place: of another place, of the answer, or different when
    they are streamed or stand alone.
    """
    folder = tiny_model_folder(tmp_path_factory.mktemp("echo"), "llama")
    asked = text(["abcd", [1, 2]], echo=True, logprobs=2, temperature=0)
    async with real_front(redis, keys, folder) as (site, _):
        _, whole = await site.post(TEXT, asked)
        chunks = await site.stream(TEXT, asked)
        _, alone = await site.post(TEXT, {**asked, "max_tokens": 0})
        _, refused = await site.post(TEXT, text(max_tokens=0))
    assert alone["usage"]["completion_tokens"] == 0
    for index, prompt in ((0, "abcd"), (1, whole["choices"][1]["text"][:2])):
        found, only = whole["choices"][index]["logprobs"], alone["choices"][index]
        assert (only["text"], only["finish_reason"]) == (prompt, "length")
        assert only["logprobs"] == {name: values[: len(prompt)] for name, values in found.items()}
        assert found["tokens"][: len(prompt)] == list(prompt)
        assert found["text_offset"] == list(range(len(found["tokens"])))
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert len(found["token_logprobs"]) == len(prompt) + 6
        assert all(1 <= len(top) <= 2 for top in found["top_logprobs"][1:])
        pieces = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["index"] == index and c["logprobs"]]
        assert [token for piece in pieces for token in piece["tokens"]] == found["tokens"]
        assert [place for piece in pieces for place in piece["text_offset"]] == found["text_offset"]
    assert refused["error"]["param"] == "max_tokens"


async def test_merged_sources_are_closed_when_one_fails() -> None:
    """A choice that goes on being followed after another one has failed."""
    closed: list[str] = []

    async def source(name: str, fails: bool) -> AsyncGenerator[str, None]:
        try:
            yield name
            if fails:
                raise ValueError(name)
            await asyncio.Event().wait()
        finally:
            closed.append(name)

    seen: list[tuple[int, str]] = []

    async def read() -> None:
        async for item in merged([source("a", False), source("b", True)]):
            seen.append(item)  # noqa: PERF401

    with pytest.raises(ValueError, match="b"):
        await read()
    assert sorted(seen) == [(0, "a"), (1, "b")]
    assert sorted(closed) == ["a", "b"]
