"""A broker that comes back without anything it knew."""

from __future__ import annotations

import shutil
import signal

from redis.asyncio import Redis

from collm_common.keys import Keys
from collm_dispatcher.dispatch import Dispatch
from tests.dispatcher.support import dispatcher, offer, register
from tests.replica.support import request
from tests.support.broker import Broker
from tests.support.waiting import eventually


async def test_the_loop_survives_a_broker_that_forgot_every_replica(redis: Redis, keys: Keys, broker: Broker) -> None:
    """A release that looks up a replica which the macro-cycle has just forgotten takes the dispatcher down."""
    await register(redis, keys, infer_batch_max=1)
    await offer(redis, keys, *(request(f"q{n}") for n in range(4)))
    async with dispatcher(redis) as running:
        await eventually(lambda: running.leaders and running.leaders["m"].held == 3)
        broker.stop(signal.SIGKILL)
        shutil.rmtree(broker.folder / "appendonlydir")
        broker.start()
        await eventually(lambda: not _carriers(running))
        await register(redis, keys)
        await offer(redis, keys, request("new"))
        await eventually(lambda: _length(redis, keys.subflow("r1")))


def _carriers(running: Dispatch) -> tuple[str, ...]:
    term = running.leaders["m"].term
    return term.planner.plan.carriers if term is not None else ("nobody leads",)


async def _length(redis: Redis, key: str) -> int:
    return int(await redis.xlen(key))
