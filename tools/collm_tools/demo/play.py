"""Plays the demo against a stack that is up: score, burst, lull, burst, score again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

import aiohttp
from msgspec import Struct, structs
from redis.asyncio import Redis

from collm_common.clock import checkpoint
from collm_common.errors import CollmError
from collm_common.keys import Keys
from collm_common.registry import Registry
from collm_tools.demo import plan
from collm_tools.demo.corpus import Corpus
from collm_tools.demo.recorder import Recorder
from collm_tools.demo.report import CrossEntropy, Report, build, unchanged
from collm_tools.load import metrics
from collm_tools.load.client import RequestRecord, Target
from collm_tools.load.prompts import Prompt
from collm_tools.load.runner import Offer, run_load

DIGEST_TIMEOUT_S = 120.0
POLL_S = 0.25


class Played(Struct, frozen=True):
    """What came of it: the report, and the records of the load from `start_s` (Unix seconds) on."""

    report: Report
    start_s: float
    records: list[RequestRecord]
    heldout: list[RequestRecord]


class Play:
    """One performance. `say` gets one line a scene, `on_done` every record of the load."""

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        recorder: Recorder,
        target: Target,
        say: Callable[[str], None],
        on_done: Callable[[RequestRecord], None] = lambda record: None,
        heldout_gap_s: float = plan.HELDOUT_GAP_S,
    ) -> None:
        self.redis, self.keys, self.recorder, self.target = redis, keys, recorder, target
        self._say, self._on_done, self._gap_s = say, on_done, heldout_gap_s

    async def perform(self, offers: Sequence[Offer], texts: Corpus) -> Played:
        """From the first digest to the last score."""
        begun_s = time.monotonic()
        digests = await fresh_digests(self.redis, self.keys)
        self._say(f"scoring {len(texts.heldout)} held-out answers before anything was learnt")
        before = await self.score(texts.heldout)
        self._say(f"held-out cross-entropy {_shown(before)}; now {len(offers)} requests arrive")
        start_s = time.time()
        records = await run_load(offers, self.target, on_done=self._on_done)
        await self.settle()
        self._say("scoring the same held-out answers again")
        after = await self.score(texts.heldout)
        self._say(f"held-out cross-entropy {_shown(before)} -> {_shown(after)}; checking the base weights")
        quality = CrossEntropy(metrics.cross_entropy(before), metrics.cross_entropy(after), len(texts.heldout))
        same = unchanged(digests, await fresh_digests(self.redis, self.keys))
        load = metrics.summarize(records, self.target.slo, max(metrics.duration_s(records), offers[-1].at_s))
        took_s = time.monotonic() - begun_s
        report = build(load, self.recorder.events, self.recorder.reports, quality, same, took_s)
        return Played(report=report, start_s=start_s, records=records, heldout=[*before, *after])

    async def score(self, heldout: Sequence[Prompt]) -> list[RequestRecord]:
        """Cross-entropy of every held-out answer under what is served now. Raises CollmError if one is missing."""
        offers = [Offer(index * self._gap_s, prompt, plan.HELDOUT_MAX_TOKENS) for index, prompt in enumerate(heldout)]
        records = await run_load(offers, structs.replace(self.target, cancel_after_s=None))
        missing = [record for record in records if record.cross_entropy is None]
        if missing:
            raise CollmError(f"{len(missing)} of {len(records)} held-out answers were not scored: {missing[0].error}")
        return records

    async def settle(self) -> None:
        """Until the jobs that run now have ended, at most JOB_PATIENCE_S."""
        end_s = time.monotonic() + plan.JOB_PATIENCE_S
        running = open_jobs = await self._open_jobs()
        if running:
            self._say("waiting for the running job to end")
        while running & open_jobs and time.monotonic() < end_s:
            await asyncio.sleep(POLL_S)
            checkpoint()
            open_jobs = await self._open_jobs()

    async def _open_jobs(self) -> set[bytes]:
        return set(await self.redis.smembers(self.keys.jobs))


async def served_as(redis: Redis, keys: Keys, model: str, within_s: float) -> str:
    """What to ask for: the adapter that `model` is trained with (version 0 is the bare model), if there is one."""
    end_s = time.monotonic() + within_s
    while True:
        names: list[str] = sorted(member.decode() for member in await redis.smembers(keys.adapters))
        for name in names:
            if await redis.hget(keys.adapter(name), "model") == model.encode():
                return name
        if time.monotonic() > end_s:
            return model
        await asyncio.sleep(POLL_S)
        checkpoint()


async def fresh_digests(redis: Redis, keys: Keys) -> Mapping[str, str]:
    """Each replica's hash of its base weights, computed now by the process that serves them."""
    infos = await Registry(redis, keys).replicas()
    timeout = aiohttp.ClientTimeout(total=DIGEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as session:

        async def one(url: str) -> str:
            try:
                async with session.get(f"{url}/digest") as response:
                    return str((await response.json())["digest"])
            except (aiohttp.ClientError, OSError, TimeoutError, KeyError) as error:
                raise CollmError(f"no digest of the base weights from {url}: {error}") from error

        found = await asyncio.gather(*(one(info.data_url) for info in infos.values()))
    return dict(zip(infos, found, strict=True))


def _shown(records: Sequence[RequestRecord]) -> str:
    value = metrics.cross_entropy(records)
    return "unknown" if value is None else f"{value:.3f}"
