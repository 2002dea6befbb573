"""Fitted latency models and chosen batch sizes, as the coordinator leaves them in Redis for its readers."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from collm_common.errors import MessageError
from collm_common.keys import Keys
from collm_common.trouble import fault, readable
from collm_common.types import BatchSizes

TermName = Literal["B", "log2(1+B)", "B/(B+k)", "min(B,k)"]


class Term(Struct, frozen=True):
    """f(B), how the training batch bears on a duration; all four are 0 at B = 0 and do not fall."""

    name: TermName = "B"
    k: float = 0.0

    def __call__(self, train_batch: float) -> float:
        """f of one batch size."""
        match self.name:
            case "B":
                return float(train_batch)
            case "log2(1+B)":
                return math.log2(1 + train_batch)
            case "B/(B+k)":
                return train_batch / (train_batch + self.k) if train_batch else 0.0
            case "min(B,k)":
                return min(float(train_batch), self.k)


class Line(Struct, frozen=True):
    """T(B, b) = base_s + per_sequence_s * b + per_train_s * f(B), in seconds (paper section 5.2).

    `r2` and `n` say how good the fit is; a slope whose flag is false was not identified by the samples: it is a prior.
    """

    base_s: float
    per_sequence_s: float = 0.0
    per_train_s: float = 0.0
    term: Term = Term()
    r2: float = 0.0
    n: int = 0
    sequence_identified: bool = False
    train_identified: bool = False

    def predict(self, train_batch: float, infer_batch: float) -> float:
        """Seconds at (B, b), never below zero."""
        return max(0.0, self.base_s + self.per_sequence_s * infer_batch + self.per_train_s * self.term(train_batch))

    def scaled(self, factor: float) -> Line:
        """The law of a machine on which everything takes `factor` times as long."""
        return replace(
            self,
            base_s=factor * self.base_s,
            per_sequence_s=factor * self.per_sequence_s,
            per_train_s=factor * self.per_train_s,
        )


class LatencyModel(Struct, frozen=True):
    """One replica: `infer` is one engine iteration beside training, `train` one micro-step (None: it never trained).

    `alone` is an iteration while nothing is trained (None: `infer` is all that is known); `output_tokens` the expected
    length L of an answer; `infer` and `train` hold for a trainer with `sm_share` of the SMs.
    """

    infer: Line
    train: Line | None = None
    prefill_s_per_token: float = 0.0
    output_tokens: float = 1.0
    alone: Line | None = None
    sm_share: float = 1.0

    def iteration_s(self, train_batch: float, infer_batch: float) -> float:
        """T_infer(B, b): seconds of one engine iteration, which is the time per output token."""
        line = self.infer if train_batch or self.alone is None else self.alone
        return line.predict(train_batch, infer_batch)

    def micro_step_s(self, train_batch: float, infer_batch: float) -> float | None:
        """T_train(B, b): seconds of one training micro-step."""
        return None if self.train is None else self.train.predict(train_batch, infer_batch)

    def prefill_s(self, prompt_tokens: float) -> float:
        """Seconds of one prompt's prefill."""
        return self.prefill_s_per_token * prompt_tokens

    def service_s(self, train_batch: float, infer_batch: float, prompt_tokens: float) -> float:
        """S(B, b) = prefill + L * T_infer(B, b), seconds."""
        return self.prefill_s(prompt_tokens) + self.output_tokens * self.iteration_s(train_batch, infer_batch)


def to_hash(model: LatencyModel) -> dict[str, str]:
    """One field a part, nested parts as JSON."""
    return {name: msgspec.json.encode(getattr(model, name)).decode() for name in model.__struct_fields__}


def from_hash(row: dict[bytes, bytes]) -> LatencyModel:
    """Raises MessageError that names the field."""
    try:
        parts = {k.decode(): msgspec.json.decode(v) for k, v in row.items()}
        return msgspec.convert(parts, LatencyModel)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MessageError(f"latency model: {error}") from error


async def save(redis: Redis, keys: Keys, replica: str, model: LatencyModel) -> None:
    """Replace `latency:{replica}`."""
    await _write(redis, keys.latency(replica), to_hash(model))


async def load(redis: Redis, keys: Keys, replica: str) -> LatencyModel | None:
    """The fitted model, None if there is none yet."""
    row = await redis.hgetall(keys.latency(replica))
    return from_hash(row) if row else None


async def save_sizes(redis: Redis, keys: Keys, replica: str, sizes: BatchSizes, reason: str) -> None:
    """The fields of `config:{replica}`; what others keep beside them stays. The reason is for people."""
    values = {"train": str(sizes.train), "infer": str(sizes.infer), "sm_share": str(sizes.sm_share), "reason": reason}
    await _write(redis, keys.config(replica), values)


def sizes_from_hash(row: dict[bytes, bytes]) -> BatchSizes | None:
    """The sizes in the fields of `config:{replica}`; None if they are not there. Raises MessageError."""
    if b"train" not in row or b"infer" not in row:
        return None
    try:
        known = {name: row[name.encode()].decode() for name in BatchSizes.__struct_fields__ if name.encode() in row}
        return msgspec.convert(known, BatchSizes, strict=False)
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise MessageError(f"batch sizes: {error}") from error


async def load_sizes(redis: Redis, keys: Keys, replica: str) -> BatchSizes | None:
    """The sizes chosen for a replica, None if none were. Raises MessageError."""
    return sizes_from_hash(await redis.hgetall(keys.config(replica)))


async def sizes_of(redis: Redis, keys: Keys, replicas: Collection[str]) -> dict[str, BatchSizes]:
    """The sizes of those for which some were chosen; damaged ones count as none."""
    async with redis.pipeline(transaction=False) as pipe:
        for id_ in replicas:
            pipe.hgetall(keys.config(id_))
        rows = await pipe.execute(raise_on_error=False)
    found = {id_: read_sizes(id_, row) for id_, row in zip(replicas, rows, strict=True)}
    return {id_: sizes for id_, sizes in found.items() if sizes is not None}


def read_sizes(replica: str, row: dict[bytes, bytes] | Exception) -> BatchSizes | None:
    """From a pipeline's reply; a damaged one counts as none."""
    return readable(sizes_from_hash, f"sizes of {replica}", row)


def read_model(replica: str, row: dict[bytes, bytes] | Exception) -> LatencyModel | None:
    """From a pipeline's reply; a damaged one counts as none."""
    return readable(from_hash, f"latency of {replica}", row)


async def _write(redis: Redis, key: str, values: dict[str, Any]) -> None:
    """Fields of a hash; a key of another type makes room for it."""
    try:
        await redis.hset(key, mapping=values)
    except ResponseError as error:
        if fault(error) != "WRONGTYPE":
            raise
        await redis.delete(key)
        await redis.hset(key, mapping=values)
