"""What a real broker says when it refuses, and what becomes of who asked."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest
import redis.exceptions as failures
from redis.asyncio import Redis

from collm_common.broker import AWAY, connection, patiently
from collm_common.clock import ManualClock
from collm_common.errors import BrokerError, BrokerFault
from collm_common.retry import once
from collm_common.trouble import AWAY_PAUSE_S, FAULT_PAUSE_S, Troubles, fault
from tests.support.broker import Broker

WRITE = "return redis.call('XADD', KEYS[1], '*', 'a', 'b')"


@pytest.fixture
async def own() -> AsyncIterator[Redis]:
    """A broker whose settings may be spoilt."""
    server = Broker()
    server.start()
    async with connection(server.url) as client:
        yield client
    server.close()


async def _refusals(redis: Redis) -> list[Exception]:
    """Of one command, of a transaction, and of a script."""
    found: list[Exception] = []

    async def plain() -> None:
        await redis.xadd("x", {"a": "b"})

    async def transaction() -> None:
        async with redis.pipeline(transaction=True) as pipe:
            pipe.ping()
            pipe.xadd("x", {"a": "OOM"})
            await pipe.execute()

    async def script() -> None:
        await redis.eval(WRITE, 1, "x")

    for ask in (plain, transaction, script):
        with pytest.raises(AWAY) as caught:
            await ask()
        found.append(caught.value)
    return found


async def test_a_damaged_key_and_a_missing_right_do_not_pass(own: Redis) -> None:
    """A broken cell that says "broker away" twice a second, for ever."""
    await own.set("x", "y")
    assert [fault(error) for error in await _refusals(own)] == ["WRONGTYPE"] * 3
    await own.execute_command("ACL", "SETUSER", "default", "-xadd")
    # A script's own lack of rights has no code of its own.
    assert [fault(error) for error in await _refusals(own)] == ["NOPERM", "NOPERM", "ERR"]
    await own.execute_command("ACL", "SETUSER", "default", "+xadd")
    await own.delete("x")
    with pytest.raises(failures.ResponseError) as caught:
        await own.eval("return nothing.at_all", 0)
    assert fault(caught.value) == "ERR"


async def test_a_broker_without_room_or_rights_to_write_passes(own: Redis) -> None:
    """A full memory taken for a fault: requests fail for good that would succeed a moment later."""
    await own.config_set("maxmemory", 1)
    full = await _refusals(own)
    await own.config_set("maxmemory", 0)
    await own.execute_command("REPLICAOF", "127.0.0.1", "9")
    read_only = await _refusals(own)
    await own.execute_command("REPLICAOF", "NO", "ONE")
    assert [fault(error) for error in full + read_only] == [""] * 6
    assert fault(failures.BusyLoadingError("loading")) == ""
    assert fault(failures.ConnectionError("WRONGTYPE")) == ""
    assert fault(failures.AuthenticationError("no", status_code="WRONGPASS")) == "WRONGPASS"


async def test_patience_is_for_what_passes() -> None:
    """A caller that waits ten minutes for somebody to repair a key."""
    clock, calls = ManualClock(), 0

    async def refused() -> None:
        nonlocal calls
        calls += 1
        raise failures.ResponseError("WRONGTYPE" if calls > 1 else "MISCONF")

    with pytest.raises(BrokerFault, match="WRONGTYPE"):
        await patiently(refused, 60.0, clock)
    assert calls == 2
    assert issubclass(BrokerFault, BrokerError)


async def test_a_fault_is_said_once_counted_always_and_tried_again_less_often(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A log that is full of one line, and a broker that is asked in vain twice a second."""
    troubles = Troubles()
    wrong = failures.ResponseError("WRONGTYPE of x")
    with caplog.at_level(logging.WARNING):
        assert [troubles.tell("a", wrong) for _ in range(3)] == [FAULT_PAUSE_S] * 3
        assert troubles.tell("b", wrong) == FAULT_PAUSE_S
        assert troubles.tell("b", failures.ConnectionError("gone")) == AWAY_PAUSE_S
    assert troubles.faults == {"WRONGTYPE": 4}
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "WARNING"]


async def test_work_goes_on_once_the_key_is_repaired(redis: Redis) -> None:
    """A loop that ends, or forgets what it was about, because of one key."""
    await redis.set("x", "y")
    clock = ManualClock()

    async def step() -> None:
        if clock.time_s > 1_000_000.0 + FAULT_PAUSE_S:
            await redis.delete("x")
        await redis.xadd("x", {"a": "b"})

    await once("x", step, clock)
    assert await redis.xlen("x") == 1
