"""What clients get: whole answers, streams, usage, timings, log-probabilities, models, health."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from collm_common import latency, messages, post, streams
from collm_common.keys import Keys
from collm_common.latency import LatencyModel, Line
from collm_common.messages import Delta, Done, InferenceReport, Request, TokenLogprob
from collm_common.types import ReplicaState
from tests.dispatcher.support import register
from tests.ingress.support import Front, chat, front, text
from tests.support.waiting import eventually

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def content(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def test_a_chat_answer_has_openais_shape(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """Clients that read choices[0].message or usage break on any other shape."""
    async with front(redis, keys, tokenizer_folder) as site:
        status, body = await site.post(CHAT, chat())
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "m"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 6
    assert body["usage"]["total_tokens"] == 6 + body["usage"]["prompt_tokens"]
    assert body["collm"]["adapter"] is None
    assert {"queue_ms", "prefill_ms", "decode_ms"} <= body["collm"].keys()


async def test_a_stream_has_the_same_text_and_ends(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A stream that differs from the whole answer, has no finish reason, or never says [DONE]."""
    async with front(redis, keys, tokenizer_folder) as site:
        _, whole = await site.post(CHAT, chat(seed=1))
        chunks = await site.stream(CHAT, chat(seed=1))
    assert content(chunks) == whole["choices"][0]["message"]["content"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] == "length"
    assert all(chunk["choices"] for chunk in chunks), "a client that did not ask for usage reads choices[0] of each"
    assert all("usage" not in chunk for chunk in chunks)


async def test_usage_comes_last_or_in_every_chunk_as_asked(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """Load generators that count tokens by usage would count none."""
    async with front(redis, keys, tokenizer_folder) as site:
        once = await site.stream(TEXT, text(stream_options={"include_usage": True}))
        always = await site.stream(
            TEXT, text(stream_options={"include_usage": True, "continuous_usage_stats": True}, stop=None)
        )
    assert [chunk["usage"]["completion_tokens"] for chunk in once if chunk["usage"] is not None] == [6]
    assert once[-1]["choices"] == []
    assert [chunk["usage"]["completion_tokens"] for chunk in always] == [1, 2, 3, 4, 5, 6, 6, 6]


async def test_a_reference_is_scored_after_the_text_has_ended(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """Quality that delays the finish, or a reference without its EOS."""
    async with front(redis, keys, tokenizer_folder) as site:
        chunks = await site.stream(CHAT, chat(reference="abcd"))
        _, whole = await site.post(CHAT, chat(reference="abcd"))
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["collm"]["cross_entropy"] == 2.0
    assert chunks[-1]["collm"]["reference_tokens"] == 5
    assert whole["collm"]["cross_entropy"] == 2.0


async def test_adapters_are_models_with_versions(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """An adapter that cannot be asked for by name or by version before its first training."""
    await redis.hset(keys.adapter("desk"), mapping={"model": "m", "version": 0})
    await redis.sadd(keys.adapters, "desk")
    async with front(redis, keys, tokenizer_folder) as site:
        _, models = await site.get("/v1/models")
        answers = [await site.post(CHAT, chat(model=name)) for name in ("desk", "desk@v0")]
        unknown = [await site.post(CHAT, chat(model=name)) for name in ("nobody", "desk@v1", "nobody@v1")]
    assert {entry["id"]: (entry["parent"], entry["root"]) for entry in models["data"]} == {
        "m": (None, "m"),
        "desk": ("m", "desk@v0"),
    }
    assert [(status, body["collm"]["adapter"]) for status, body in answers] == [(200, "desk@v0")] * 2
    assert [(status, body["error"]["code"]) for status, body in unknown] == [(404, "model_not_found")] * 3


async def test_a_prompt_may_be_tokens(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """Benchmarks that send token ids."""
    async with front(redis, keys, tokenizer_folder) as site:
        _, ids = await site.post(TEXT, text([[1, 2, 3]]))
        wrong = [await site.post(TEXT, text([1, token])) for token in (10_000, -1)]
    assert ids["usage"]["prompt_tokens"] == 3
    assert [(status, body["error"]["param"]) for status, body in wrong] == [(400, "prompt")] * 2


async def test_liveness_readiness_and_metrics(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A probe that depends on the queue, or a dashboard that stays empty."""
    async with front(redis, keys, tokenizer_folder) as site:
        await site.post(CHAT, chat())
        await site.post(CHAT, chat(tools=[{}]))
        health, ready = await site.get("/health"), await site.get("/ready")
        async with site.http.get("/metrics") as response:
            page = await response.text()
        await redis.hset(keys.replica("r1"), "ready", "0")
        await eventually(lambda: _status(site, "/ready", 503))
        assert (await site.get("/health"))[0] == 200
    assert (health[0], ready[0]) == (200, 200)
    for line in (
        'collm:request_success_total{finished_reason="length",model_name="m"} 1.0',
        'collm:num_requests_running{model_name="m"} 0.0',
        'collm:goodput_tokens_total{model_name="m",slo="default"} 6.0',
        'collm:slo_attainment{model_name="m",slo="default"} 1.0',
        'collm:requests_rejected_total{reason="unsupported_parameter"} 1.0',
        'collm:time_to_first_token_seconds_count{model_name="m"} 1.0',
    ):
        assert line in page


async def test_what_was_not_computed_again_is_told(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A client that pays for cached tokens and never sees them, counted once a choice, and a dashboard without them."""
    async with front(redis, keys, tokenizer_folder) as site:
        prompt = list(range(100, 150))
        _, first = await site.post(TEXT, text(prompt))
        _, again = await site.post(TEXT, text([prompt, [1, 2]], n=2))
        async with site.http.get("/metrics") as response:
            said = await response.text()
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}
    assert again["usage"]["prompt_tokens"] == 52
    assert 'collm:prefix_cache_queries_total{model_name="m"} 154.0' in said
    assert 'collm:prefix_cache_hits_total{model_name="m"} 96.0' in said


async def test_how_full_each_replica_is_follows_its_reports(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """A gauge that stays where it was, or that shows a replica which is not there."""
    await register(redis, keys)
    numbers = ("time_s", "utilisation", "memory_bytes", "queue", "running", "mean_batch", "limit", "train_batch")
    same: dict[str, Any] = {"state": ReplicaState.SERVING, **dict.fromkeys(numbers, 0)}
    async with front(redis, keys, tokenizer_folder, replicas=0) as site:

        async def says(usage: float) -> bool:
            report = InferenceReport(replica="r1", kv_usage=usage, preemptions=round(4 * usage), **same)
            await post.report(redis, keys, report)
            await post.report(redis, keys, InferenceReport(replica="gone", kv_usage=0.5, **same))
            async with site.http.get("/metrics") as response:
                page = await response.text()
            found = re.findall(r"(?:kv_cache_usage_perc|num_preemptions_total){(.*)} (.*)", page)
            return found == [('model_name="m",replica="r1"', str(value)) for value in (usage, 4 * usage)]

        await eventually(lambda: says(0.25))
        await eventually(lambda: says(0.75))


async def test_what_was_expected_of_a_request_is_beside_what_it_took(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """A prediction that nobody compares with its outcome: the fits drift, and every batch is wrong."""
    await latency.save(redis, keys, "r1", LatencyModel(infer=Line(base_s=0.002), prefill_s_per_token=1e-4))
    async with front(redis, keys, tokenizer_folder, step_s=0.004) as site:
        for _ in range(3):
            await site.post(CHAT, chat())
        async with site.http.get("/metrics") as response:
            page = await response.text()
    found = dict(re.findall(r'collm:(\w+?)_seconds_total\{model_name="m",stage="token"\} (\S+)', page))
    assert float(found["predicted"]) == pytest.approx(3 * 0.002)
    assert float(found["outcome"]) >= 3 * 0.004
    assert 'collm:outcome_over_predicted_count{model_name="m",stage="first_token"} 3.0' in page


async def test_metrics_have_vllms_names_too_if_asked_for(redis: Redis, keys: Keys, tokenizer_folder: Path) -> None:
    """Stock dashboards that stay empty; or the aliases of what vLLM does not measure, or measures otherwise."""
    await redis.hset(keys.adapter("desk"), mapping={"model": "m", "version": 3})
    await redis.sadd(keys.adapters, "desk")
    async with front(redis, keys, tokenizer_folder, vllm_metrics=True) as site:
        await site.post(TEXT, text(n=2))
        async with site.http.get("/metrics") as response:
            page = await response.text()
    own, theirs = ([line for line in page.splitlines() if line.startswith(prefix)] for prefix in ("collm:", "vllm:"))
    for line in (
        'request_success_total{finished_reason="length",model_name="m"} 2.0',
        'request_generation_tokens_sum{model_name="m"} 12.0',
        'request_params_n_sum{model_name="m"} 2.0',
        'request_params_max_tokens_sum{model_name="m"} 12.0',
        'request_prompt_tokens_count{model_name="m"} 2.0',
        'request_prefill_time_seconds_count{model_name="m"} 2.0',
    ):
        assert f"collm:{line}" in own
        assert f"vllm:{line}" in theirs
    assert not any("goodput" in line or "slo" in line for line in theirs)
    assert 'collm:replica_state{model_name="m",replica="r1",state="serving"} 1.0' in own
    assert 'collm:adapter_version{adapter="desk",model_name="m"} 3.0' in own


async def _status(site: Front, path: str, wanted: int) -> bool:
    return (await site.get(path))[0] == wanted


async def test_log_probabilities_have_the_shape_of_each_endpoint(
    redis: Redis, keys: Keys, tokenizer_folder: Path
) -> None:
    """Evaluation harnesses that read log-probabilities by position."""
    await register(redis, keys)
    async with front(redis, keys, tokenizer_folder, replicas=0) as site:
        for path, body in ((CHAT, chat(logprobs=True, top_logprobs=1)), (TEXT, text(logprobs=1))):
            asked = asyncio.create_task(site.post(path, body))
            await eventually(lambda: redis.xlen(keys.subflow("r1")))
            ((entry_id, row),) = await redis.xrange(keys.subflow("r1"))
            request = messages.decode(row[b"data"])
            assert isinstance(request, Request)
            assert request.sampling.logprobs == 1
            told = tuple(TokenLogprob(token, -0.5, ((token, -0.5),)) for token in (64, 65))
            delta = Delta(request.id, 0, 0, (64, 65), "ab", None, "length", told)
            reply = messages.Replies(items=(delta, Done(request.id, 0, 2, 0.0, 0.0, 0.0)))
            await redis.xdel(keys.subflow("r1"), entry_id)
            await streams.append(redis, keys.replies(request.ingress), "replies", request.id, messages.encode(reply))
            _, answer = await asked
            found = answer["choices"][0]["logprobs"]
            if path == CHAT:
                assert [entry["logprob"] for entry in found["content"]] == [-0.5, -0.5]
                assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in found["content"])
                assert all(bytes(entry["bytes"]).decode() == entry["token"] for entry in found["content"])
            else:
                assert found["token_logprobs"] == [-0.5, -0.5]
                assert found["text_offset"] == [0, 1]
                assert [list(top) for top in found["top_logprobs"]] == [[token] for token in found["tokens"]]
