"""Open loop: each request is sent when its time has come, whatever became of those before it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import aiohttp

from collm_tools.load.client import RequestRecord, Target, ask
from collm_tools.load.prompts import Prompt, random_prompt
from collm_tools.load.traffic import Arrival

DEFAULT_PROMPT_TOKENS = 32
DEFAULT_MAX_TOKENS = 64


@dataclass(frozen=True)
class Offer:
    """One request of a plan."""

    at_s: float
    prompt: Prompt
    max_tokens: int


def plan(
    arrivals: Sequence[Arrival], prompts: Sequence[Prompt], max_tokens: int | None = None, seed: int = 0
) -> list[Offer]:
    """Pair arrivals with prompts, each used once before any is used again; random ones of the wanted length if none.

    `max_tokens` caps what a trace asks for, and is what is asked for where it says nothing.
    """
    rng = random.Random(seed)
    order: list[Prompt] = []
    offers = []
    for arrival in arrivals:
        if prompts and not order:
            order = rng.sample(list(prompts), len(prompts))
        prompt = order.pop() if order else random_prompt(arrival.prompt_tokens or DEFAULT_PROMPT_TOKENS, rng)
        cap = max_tokens or arrival.output_tokens or DEFAULT_MAX_TOKENS
        offers.append(Offer(arrival.at_s, prompt, max(1, min(cap, arrival.output_tokens or cap))))
    return offers


async def run_load(
    offers: Sequence[Offer],
    target: Target | Callable[[], Target],
    *,
    max_in_flight: int = 1000,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> list[RequestRecord]:
    """Play the plan; one record for each offer, in its order. A `target` that may change is asked for each time.

    A request that would be one too many in flight is not sent and counts as failed. Returns when the last has
    ended, which the target's timeout bounds.
    """
    start_s = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        pending: set[asyncio.Task[RequestRecord]] = set()
        slots: list[RequestRecord | asyncio.Task[RequestRecord]] = []
        try:
            for offer in offers:
                await asyncio.sleep(max(0.0, offer.at_s - (time.monotonic() - start_s)))
                if len(pending) >= max_in_flight:
                    slots.append(_dropped(offer, max_in_flight, on_done))
                    continue
                now = target if isinstance(target, Target) else target()
                task = asyncio.create_task(_one(session, now, offer, on_done))
                pending.add(task)
                task.add_done_callback(pending.discard)
                slots.append(task)
            return [slot if isinstance(slot, RequestRecord) else await slot for slot in slots]
        finally:
            for task in list(pending):
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)


async def _one(
    session: aiohttp.ClientSession, target: Target, offer: Offer, on_done: Callable[[RequestRecord], None]
) -> RequestRecord:
    record = await ask(session, target, offer.prompt, offer.max_tokens, offer.at_s)
    on_done(record)
    return record


def _dropped(offer: Offer, limit: int, on_done: Callable[[RequestRecord], None]) -> RequestRecord:
    record = RequestRecord(at_s=offer.at_s, sent_s=time.time(), error=f"not sent: {limit} requests in flight")
    on_done(record)
    return record
