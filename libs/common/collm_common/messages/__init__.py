"""Every message that crosses Redis: one Struct a kind, one tagged union a receiver, MessagePack on the wire.

A stream entry is `kind`, `id` (readable in redis-cli) and `data` (the bytes of `encode`). `decode` checks types,
ranges and the schema version on arrival; a wrong message raises MessageError that names the field.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from collm_common.errors import MessageError
from collm_common.messages.base import SCHEMA, Message, RequestId, Tokens
from collm_common.messages.control import (
    Aggregate,
    Cancel,
    Configure,
    Control,
    Evaluate,
    Hyperparams,
    Leave,
    LoadAdapter,
    PauseTraining,
    ResumeTraining,
    ServerRates,
    StopTraining,
    TrainRound,
    UnloadAdapter,
)
from collm_common.messages.events import (
    AdapterPublished,
    AdapterRolledBack,
    Aggregated,
    Evaluated,
    Event,
    JobChanged,
    ReplicaChanged,
    StateChanged,
    TaskFailed,
    UpdateUploaded,
)
from collm_common.messages.replies import Delta, Done, Expected, Failed, Lost, Replies, Reply, TokenLogprob
from collm_common.messages.telemetry import Answered, InferenceReport, Iteration, Scored, Served, Telemetry, TrainReport
from collm_common.messages.work import Freed, Request

__all__ = [
    "SCHEMA",
    "AdapterPublished",
    "AdapterRolledBack",
    "Aggregate",
    "Aggregated",
    "Answered",
    "AnyMessage",
    "Cancel",
    "Configure",
    "Control",
    "Delta",
    "Done",
    "Evaluate",
    "Evaluated",
    "Event",
    "Expected",
    "Failed",
    "Freed",
    "Hyperparams",
    "InferenceReport",
    "Iteration",
    "JobChanged",
    "Leave",
    "LoadAdapter",
    "Lost",
    "Message",
    "PauseTraining",
    "ReplicaChanged",
    "Replies",
    "Reply",
    "Request",
    "RequestId",
    "ResumeTraining",
    "Scored",
    "Served",
    "ServerRates",
    "StateChanged",
    "StopTraining",
    "TaskFailed",
    "Telemetry",
    "TokenLogprob",
    "Tokens",
    "TrainReport",
    "TrainRound",
    "UnloadAdapter",
    "UpdateUploaded",
    "decode",
    "decode_as",
    "encode",
    "kind",
]

AnyMessage = Request | Freed | Replies | Control | Telemetry | Event

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The bytes that `decode` takes back."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Raises MessageError that names what is wrong and where."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise MessageError(f"bad message: {error}") from error


M = TypeVar("M", bound=Message)


def decode_as(type_: type[M], data: bytes) -> M:
    """`decode` for a stream of one type of message; any other is a MessageError."""
    message = decode(data)
    if not isinstance(message, type_):
        raise MessageError(f"bad message: {kind(message)} where {type_.__struct_config__.tag} belongs")
    return message


def kind(message: AnyMessage) -> str:
    """The readable kind of a message, as in the stream entry's field."""
    return str(type(message).__struct_config__.tag)
