"""Latency models and batch sizes in Redis, and what they predict."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from collm_common import latency
from collm_common.errors import MessageError
from collm_common.keys import Keys
from collm_common.latency import LatencyModel, Line, Term
from collm_common.trouble import TROUBLES
from collm_common.types import BatchSizes

TERMS = (Term(), Term("log2(1+B)"), Term("B/(B+k)", 4), Term("min(B,k)", 4))


@pytest.mark.parametrize("term", TERMS)
def test_every_term_is_nothing_without_training_and_never_falls(term: Term) -> None:
    """A serving replica that pays for training, or a bigger B that looks cheaper."""
    values = [term(batch) for batch in range(33)]
    assert values[0] == 0
    assert values == sorted(values)
    assert values[1] > 0


def test_service_time_is_prefill_and_one_iteration_a_token() -> None:
    """An S(B, b) that forgets the prompt, or the training beside it."""
    model = LatencyModel(Line(0.01, 0.001, 0.002), prefill_s_per_token=0.0001, output_tokens=10)
    assert model.service_s(3, 4, 100) == pytest.approx(0.01 + 10 * (0.01 + 0.004 + 0.006))
    assert model.micro_step_s(1, 1) is None
    apart = LatencyModel(Line(0.02), alone=Line(0.01))
    assert (apart.iteration_s(1, 1), apart.iteration_s(0, 1)) == (0.02, 0.01)
    assert LatencyModel(Line(-1.0)).iteration_s(0, 1) == 0


async def test_what_is_saved_is_loaded(redis: Redis, keys: Keys) -> None:
    """A field that one side writes and the other does not read."""
    assert await latency.load(redis, keys, "r1") is None
    assert await latency.load_sizes(redis, keys, "r1") is None
    line = Line(0.01, 0.002, 0.003, Term("min(B,k)", 4), r2=0.9, n=12, sequence_identified=True, train_identified=True)
    for model in (LatencyModel(line, line, 0.0001, 20), LatencyModel(line)):
        await latency.save(redis, keys, "r1", model)
        assert await latency.load(redis, keys, "r1") == model
    await redis.hset(keys.config("r1"), mapping={"train": "1", "infer": "4"})
    assert await latency.load_sizes(redis, keys, "r1") == BatchSizes(1, 4), "as older coordinators wrote it"
    await latency.save_sizes(redis, keys, "r1", BatchSizes(2, 8, 0.3), "because")
    assert await latency.load_sizes(redis, keys, "r1") == BatchSizes(2, 8, 0.3)
    assert await redis.hget(keys.config("r1"), "reason") == b"because"


async def test_damaged_fields_are_named(redis: Redis, keys: Keys) -> None:
    """A hand-edited value that ends a service with a foreign error."""
    await redis.hset(keys.latency("r1"), "infer", '{"base_s": "fast"}')
    with pytest.raises(MessageError, match="base_s"):
        await latency.load(redis, keys, "r1")
    await redis.hset(keys.latency("r1"), "infer", "{")
    with pytest.raises(MessageError):
        await latency.load(redis, keys, "r1")
    await redis.hset(keys.config("r1"), mapping={"train": "many", "infer": "1"})
    with pytest.raises(MessageError, match="train"):
        await latency.load_sizes(redis, keys, "r1")
    await redis.hset(keys.config("r1"), mapping={"train": b"\xff", "infer": "1"})
    with pytest.raises(MessageError, match="batch sizes"):
        await latency.load_sizes(redis, keys, "r1")
    await redis.hset(keys.latency("r1"), b"\xff", "1")
    with pytest.raises(MessageError, match="latency model"):
        await latency.load(redis, keys, "r1")


async def test_damaged_rows_count_as_none_and_are_repaired_by_the_next_write(redis: Redis, keys: Keys) -> None:
    """A launcher or coordinator that nobody can lead because of one replica's key."""
    await latency.save_sizes(redis, keys, "r1", BatchSizes(1, 4), "test")
    await redis.hset(keys.config("r2"), mapping={"train": "x", "infer": "4"})
    await redis.set(keys.config("r3"), "x")
    await redis.hset(keys.config("r2"), "beside", "of another service")
    before = TROUBLES.faults.copy()
    assert await latency.sizes_of(redis, keys, ["r1", "r2", "r3", "r4"]) == {"r1": BatchSizes(1, 4)}
    assert TROUBLES.faults - before == {"DAMAGED": 1, "WRONGTYPE": 1}
    for id_ in ("r2", "r3"):
        await latency.save_sizes(redis, keys, id_, BatchSizes(2, 3), "test")
        assert await latency.load_sizes(redis, keys, id_) == BatchSizes(2, 3)
    assert await redis.hget(keys.config("r2"), "beside") == b"of another service"
