"""Fine-tuning that makes way for decoding."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from collm_common.keys import Keys
from collm_common.types import SamplingParams, Slo
from collm_replica.pressure import Pressure
from tests.replica.support import request, send, serving, settings
from tests.support.waiting import eventually


def test_steps_near_the_limit_are_pressure_until_they_are_well_below_it() -> None:
    """A trainer that is stopped and started with every step, or by a single slow one."""
    pressure = Pressure()
    assert not any(pressure.update(0.020, 0.050) for _ in range(20))
    assert not pressure.update(0.120, 0.050)
    assert [pressure.update(0.060, 0.050) for _ in range(10)].count(True) == 1
    assert pressure.high
    assert not any(pressure.update(0.040, 0.050) for _ in range(30))
    assert pressure.high
    assert [pressure.update(0.030, 0.050) for _ in range(30)].count(True) == 1
    assert not pressure.high


def test_without_a_limit_or_work_there_is_no_pressure() -> None:
    """A trainer that waits for requests which are long gone."""
    pressure = Pressure()
    assert pressure.update(0.060, 0.050)
    assert pressure.update(0.060, None)
    assert pressure.update(0.060, 0.050)
    assert pressure.rest()
    assert not pressure.high
    assert not pressure.rest()


async def test_the_strictest_running_request_counts(redis: Redis, keys: Keys) -> None:
    """Steps that are judged by the limit of a class, of no request, or of one that has ended."""
    async with serving(redis, settings(), lambda sequences, tokens: 0.02) as running:
        await send(redis, keys, request("easy", slo=Slo("easy", tpot_s=10.0), sampling=SamplingParams(max_tokens=100)))
        await eventually(lambda: running.engine.running == 1)
        assert not running.pressure.high
        await send(
            redis, keys, request("strict", slo=Slo("strict", tpot_s=0.01), sampling=SamplingParams(max_tokens=8))
        )
        await asyncio.wait_for(running.pressure_changed.wait(), 10)
        assert running.pressure.high
        running.pressure_changed.clear()
        await asyncio.wait_for(running.pressure_changed.wait(), 10)
        assert not running.pressure.high
