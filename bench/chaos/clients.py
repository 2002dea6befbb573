"""Clients of a cell under faults: patient ones that stream or wait, slow readers, and some that leave."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import aiohttp

from collm_tools.load.client import REJECTIONS, events

Kind = Literal["streaming", "whole", "slow", "leaving"]
KINDS: tuple[Kind, ...] = ("streaming",) * 7 + ("whole", "slow", "leaving")
PATIENCE_S = 120.0
SLOW_READ_S = 0.03
MAX_OPEN = 48


@dataclass(frozen=True)
class Question:
    """One of a fixed set, its answer's length, and its greedy answer by an undisturbed cell ("" until known)."""

    text: str
    tokens: int
    answer: str = ""
    model: str = "tiny"


@dataclass
class Record:
    """What became of one request. `fault` is "" unless something went wrong: lost, repeated, mixed or refused.

    `turned_away` counts 429 and 503; `cut` how often its own HTTP service died under it, after which it asked again.
    """

    kind: Kind
    ingress: str
    sent_s: float
    ended_s: float | None = None
    completed: bool = False
    turned_away: int = 0
    cut: int = 0
    longest_pause_s: float = 0.0
    fault: str = ""
    text: str = ""
    finished: bool = False
    heard_s: float = 0.0

    def begin(self) -> None:
        """A new try."""
        self.text, self.finished, self.heard_s = "", False, time.monotonic()

    def add(self, text: str) -> None:
        """One more part of the answer."""
        now_s = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now_s - self.heard_s)
        self.text, self.heard_s = self.text + text, now_s


@dataclass
class Load:
    """Open loop: `rate` requests a second, spread over the ingresses at `urls`, until `stop`."""

    urls: Sequence[str]
    questions: Sequence[Question]
    rate: float
    rng: random.Random
    records: list[Record] = field(default_factory=list)
    not_sent: int = 0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    def stop(self) -> None:
        """No new requests; `run` returns when those that are open have ended."""
        self._stop.set()

    async def run(self) -> None:
        """Ask until stopped."""
        open_: set[asyncio.Task[None]] = set()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            while not self._stop.is_set():
                if len(open_) < MAX_OPEN:
                    task = asyncio.create_task(self._one(session))
                    open_.add(task)
                    task.add_done_callback(open_.discard)
                else:
                    self.not_sent += 1
                try:
                    async with asyncio.timeout(self.rng.expovariate(self.rate)):
                        await self._stop.wait()
                except TimeoutError:
                    continue
            await asyncio.gather(*open_)

    def flows_since(self, moment_s: float) -> float | None:
        """When every ingress had completed a request that was sent after `moment_s`; None while one has not."""
        ends = []
        for url in self.urls:
            done = [r.ended_s for r in self.records if r.ingress == url and r.completed and r.sent_s >= moment_s]
            if not done:
                return None
            ends.append(min(end for end in done if end is not None))
        return max(ends)

    async def _one(self, session: aiohttp.ClientSession) -> None:
        record = Record(self.rng.choice(KINDS), self.rng.choice(self.urls), time.monotonic())
        self.records.append(record)
        question = self.rng.choice(self.questions)
        stay = self.rng.randint(0, 10) if record.kind == "leaving" else None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not await ask(session, question, record, stay):
                    pass
        except TimeoutError:
            record.fault = f"lost: no answer within {PATIENCE_S:g} s"
        record.ended_s = time.monotonic()


async def ask(session: aiohttp.ClientSession, question: Question, record: Record, stay: int | None = None) -> bool:
    """One try; whether it was the last one. The record tells the end; a client leaves after `stay` chunks."""
    body = {
        "model": question.model,
        "messages": [{"role": "user", "content": question.text}],
        "max_tokens": question.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": record.kind != "whole",
    }
    record.begin()
    try:
        async with session.post(f"{record.ingress}/v1/chat/completions", json=body) as response:
            if response.status in REJECTIONS:
                return await _turned_away(response, record)
            if response.status != 200:
                record.fault = f"refused: HTTP {response.status} {(await response.text())[:200]}"
                return True
            if record.kind == "whole":
                answer = await response.json()
                record.add(answer["choices"][0]["message"]["content"])
                record.finished = bool(answer["choices"][0]["finish_reason"])
            else:
                await _follow(response, record, stay)
    except (aiohttp.ClientError, ConnectionError) as error:
        return await _cut(record, question, error)
    except ValueError as error:
        record.fault = f"refused: unreadable answer: {error}"
        return True
    if stay is not None and not record.finished and not record.fault:
        return True
    record.fault = record.fault or verdict(record.text, record.finished, question.answer)
    record.completed = not record.fault
    return True


async def _follow(response: aiohttp.ClientResponse, record: Record, stay: int | None) -> None:
    chunks = 0
    async for chunk in events(response.content):
        if error := chunk.get("error"):
            record.fault = f"lost: {json.dumps(error)[:200]}"
            return
        for choice in chunk.get("choices") or ():
            if record.finished:
                record.fault = "repeated: something after the end"
                return
            record.add((choice.get("delta") or {}).get("content") or "")
            record.finished = bool(choice.get("finish_reason"))
        chunks += 1
        if stay is not None and chunks > stay:
            response.close()
            return
        if record.kind == "slow":
            await asyncio.sleep(SLOW_READ_S)


async def _turned_away(response: aiohttp.ClientResponse, record: Record) -> bool:
    record.turned_away += 1
    pause = response.headers.get("Retry-After", "")
    if not pause.isdigit():
        record.fault = f"refused: HTTP {response.status} without Retry-After"
        return True
    await asyncio.sleep(min(5.0, float(pause)))
    return False


async def _cut(record: Record, question: Question, error: Exception) -> bool:
    """The HTTP service died: what it said until then must be the beginning of the answer; ask again."""
    record.cut += 1
    if question.answer and not question.answer.startswith(record.text):
        record.fault = f"mixed: cut off after {record.text!r}: {error}"
        return True
    await asyncio.sleep(0.2)
    return False


def verdict(text: str, finished: bool, expected: str) -> str:
    """What is wrong with an answer, "" if nothing; an unknown `expected` cannot differ."""
    if not finished:
        return f"lost: the stream ended without a finish reason after {len(text)} characters"
    if not expected or text == expected:
        return ""
    if expected.startswith(text):
        return f"lost: {len(expected) - len(text)} characters of the end are missing"
    shared = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), len(expected))
    kind = "repeated" if 0 <= expected.find(text[shared : shared + 20]) < shared else "mixed"
    return f"{kind}: {text[shared : shared + 40]!r} instead of {expected[shared : shared + 40]!r} at {shared}"
