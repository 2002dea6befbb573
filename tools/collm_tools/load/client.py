"""One request over HTTP: streamed chat completion in, one record out. Nothing that happens to it goes unrecorded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import aiohttp
from msgspec import Struct

from collm_common.types import Slo
from collm_tools.load.prompts import Prompt

Outcome = Literal["completed", "rejected", "failed"]
REJECTIONS = (429, 503)


class Target(Struct, frozen=True):
    """Where and how to ask. `slo_class` names an objective the service knows; else `slo`'s limits are sent along."""

    url: str
    model: str
    slo: Slo
    slo_class: str = ""
    api_key: str = ""
    timeout_s: float = 120.0
    cancel_after_s: float | None = None
    temperature: float = 0.0
    ignore_eos: bool = False


class RequestRecord(Struct):
    """What became of one offered request. Times: `at_s` into the run, `sent_s` Unix, latencies from sending.

    rejected: the service refused it (429, 503); failed: anything else that is not a whole answer, `cancelled` by this
    client included. `cross_entropy` is that of the reference (nats), under `adapter` ("" for the base model).
    """

    at_s: float
    sent_s: float = 0.0
    outcome: Outcome = "failed"
    error: str = ""
    cancelled: bool = False
    ttft_s: float | None = None
    e2e_s: float | None = None
    output_tokens: int = 0
    adapter: str = ""
    cross_entropy: float | None = None
    reference_tokens: int = 0
    text: str = ""

    def met(self, slo: Slo) -> bool:
        """A whole answer inside every limit."""
        if self.outcome != "completed" or self.ttft_s is None or self.e2e_s is None:
            return False
        return slo.met(self.ttft_s, self.e2e_s, self.output_tokens)


def body(target: Target, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
    """The chat completion request; `reference` and `slo` are the service's extensions."""
    fields: dict[str, Any] = {
        "model": target.model,
        "messages": [{"role": role, "content": content} for role, content in prompt.messages],
        "max_tokens": max_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        fields["ignore_eos"] = True
    if prompt.reference:
        fields["reference"] = prompt.reference
    if slo := slo_field(target):
        fields["slo"] = slo
    return fields


def slo_field(target: Target) -> str | dict[str, float]:
    """The name of a class, or the limits in milliseconds; empty when there are none."""
    if target.slo_class:
        return target.slo_class
    limits = {"ttft_ms": target.slo.ttft_s, "tpot_ms": target.slo.tpot_s, "e2e_ms": target.slo.e2e_s}
    return {name: 1000 * limit for name, limit in limits.items() if limit is not None}


async def ask(
    session: aiohttp.ClientSession, target: Target, prompt: Prompt, max_tokens: int, at_s: float
) -> RequestRecord:
    """Send one request and follow it to its end, at most `timeout_s`. Never raises for what the service does."""
    record = RequestRecord(at_s=at_s, sent_s=time.time())
    limits = [limit for limit in (target.timeout_s, target.cancel_after_s) if limit is not None]
    try:
        async with asyncio.timeout(min(limits)):
            await _follow(session, target, prompt, max_tokens, record)
    except TimeoutError:
        record.cancelled = target.cancel_after_s is not None and target.cancel_after_s < target.timeout_s
        record.error = f"{'cancelled' if record.cancelled else 'no end'} after {min(limits):g} s"
    except (aiohttp.ClientError, OSError) as error:
        record.error = f"{type(error).__name__}: {error}"
    except ValueError as error:
        record.error = f"unreadable answer: {error}"
    return record


async def _follow(
    session: aiohttp.ClientSession, target: Target, prompt: Prompt, max_tokens: int, record: RequestRecord
) -> None:
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    url = target.url.rstrip("/") + "/v1/chat/completions"
    start_s = time.monotonic()
    async with session.post(url, json=body(target, prompt, max_tokens), headers=headers) as response:
        if response.status != 200:
            record.outcome = "rejected" if response.status in REJECTIONS else "failed"
            record.error = f"HTTP {response.status}: {_reason(await response.text())}"
            return
        finish = ""
        async for chunk in events(response.content):
            now_s = time.monotonic() - start_s
            if not finish:
                # What follows the finish reason, such as the reference's score, is not part of the answer.
                record.e2e_s = now_s
            finish = _absorb(chunk, now_s, record) or finish
        if record.error:
            return
        if not finish:
            record.error = "the stream ended without a finish reason"
        else:
            record.outcome = "completed"


async def events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream up to [DONE]. Raises ValueError on anything else."""
    async for line in stream:
        data = line.decode().strip()
        if not data.startswith("data:"):
            continue
        data = data.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        chunk = json.loads(data)
        if not isinstance(chunk, dict):
            raise ValueError(f"an event is no object: {data[:80]}")
        yield chunk


def _absorb(chunk: dict[str, Any], now_s: float, record: RequestRecord) -> str:
    """Take over what one chunk says; returns the finish reason if it is told."""
    if error := chunk.get("error"):
        record.error = str(error.get("message", error) if isinstance(error, dict) else error)
        if isinstance(error, dict) and str(error.get("code")).startswith("rejected"):
            record.outcome = "rejected"
    finish = ""
    for choice in chunk.get("choices") or ():
        text = (choice.get("delta") or {}).get("content") or ""
        if text:
            record.ttft_s = now_s if record.ttft_s is None else record.ttft_s
            record.text += text
            record.output_tokens += 1
        finish = choice.get("finish_reason") or finish
    if finish and record.ttft_s is None:
        record.ttft_s = now_s
    if usage := chunk.get("usage"):
        record.output_tokens = int(usage.get("completion_tokens", record.output_tokens))
    if extra := chunk.get("collm"):
        record.adapter = extra.get("adapter") or record.adapter
        record.cross_entropy = extra.get("cross_entropy", record.cross_entropy)
        record.reference_tokens = int(extra.get("reference_tokens") or record.reference_tokens)
    return finish


def _reason(text: str) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200]
