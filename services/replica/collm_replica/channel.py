"""The line between the supervisor and a child: framed MessagePack over a socket pair."""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from collm_common.errors import MessageError
from collm_common.messages import (
    Aggregate,
    Cancel,
    Configure,
    Evaluate,
    LoadAdapter,
    PauseTraining,
    ResumeTraining,
    StopTraining,
    TrainRound,
    UnloadAdapter,
)
from collm_common.types import AdapterRef, Share

MAX_FRAME_BYTES = 1 << 20


class Local(Struct, frozen=True, tag_field="kind", kw_only=True):
    """Base of the messages that stay inside a replica."""


class Ready(Local, frozen=True, kw_only=True, tag="ready"):
    """The child has done its first real step. `on_device`: the weights live in device memory that dies with it."""

    base_digest: str = ""
    context_tokens: int = 0
    infer_batch_max: int = 0
    on_device: bool = False


class Alive(Local, frozen=True, kw_only=True, tag="alive"):
    """Sent about twice a second. While `busy`, `progress` must grow or the child counts as stuck."""

    progress: int
    busy: bool


class Attach(Local, frozen=True, kw_only=True, tag="attach"):
    """To the fine-tuning process: how to reach device memory (b"" on CPU, where a descriptor was inherited)."""

    weights: bytes


class Snapshot(Local, frozen=True, kw_only=True, tag="snapshot"):
    """From the fine-tuning to the inference process: adapter tensors in a file that the reader removes."""

    ref: AdapterRef
    path: str
    rank: Annotated[int, Meta(ge=1)]
    alpha: float


class Training(Local, frozen=True, kw_only=True, tag="training"):
    """The micro-batch that is being trained right now (0: nothing), and the SM share that it is trained with."""

    batch: Annotated[int, Meta(ge=0)]
    sm_share: Share = 1.0


class Yield(Local, frozen=True, kw_only=True, tag="yield"):
    """From the inference to the fine-tuning process: whether decoding must go first for now."""

    wanted: bool


class Finished(Local, frozen=True, kw_only=True, tag="finished"):
    """The fine-tuning process is through with a task, however it ended (`task` is the command's kind)."""

    task: str


class Drain(Local, frozen=True, kw_only=True, tag="drain"):
    """To the inference process: take nothing new, finish what runs, exit. To the other one: exit."""


class ExportRequest(Local, frozen=True, kw_only=True, tag="export_request"):
    """Export the weights in device memory once more: each consumer needs an export of its own."""


class ExportReply(Local, frozen=True, kw_only=True, tag="export_reply"):
    """The export, for `Attach`."""

    weights: bytes


class DigestRequest(Local, frozen=True, kw_only=True, tag="digest_request"):
    """Hash the base weights as they are now."""


class DigestReply(Local, frozen=True, kw_only=True, tag="digest_reply"):
    """The hash."""

    digest: str


ToChild = (
    Attach
    | Snapshot
    | Training
    | Yield
    | Drain
    | DigestRequest
    | ExportRequest
    | Cancel
    | Configure
    | LoadAdapter
    | UnloadAdapter
    | TrainRound
    | Aggregate
    | Evaluate
    | PauseTraining
    | ResumeTraining
    | StopTraining
)
ToSupervisor = Ready | Alive | Snapshot | Training | Yield | Finished | DigestReply | ExportReply
AnyLocal = ToChild | ToSupervisor

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyLocal] = msgspec.msgpack.Decoder(AnyLocal)


class Channel:
    """One end. Messages arrive whole and in order."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, end: socket.socket) -> Channel:
        """Take over one end of a socket pair."""
        end.setblocking(False)
        return cls(*await asyncio.open_unix_connection(sock=end, limit=2 * MAX_FRAME_BYTES))

    async def send(self, message: AnyLocal) -> None:
        """Raises ConnectionError when the other end is gone."""
        data = _encoder.encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise MessageError(f"frame of {len(data)} bytes is over the limit of {MAX_FRAME_BYTES}")
        try:
            self._writer.write(len(data).to_bytes(4, "big") + data)
        except RuntimeError as error:
            # What asyncio calls a connection that is closed, uvloop calls a handle that is.
            raise ConnectionResetError(str(error)) from error
        await self._writer.drain()

    async def receive(self) -> AnyLocal | None:
        """The next message, or None when the other end closed or died."""
        try:
            size = int.from_bytes(await self._reader.readexactly(4), "big")
            if size > MAX_FRAME_BYTES:
                raise MessageError(f"frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
            return _decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        """Close this end; the other one receives None."""
        self._writer.close()
