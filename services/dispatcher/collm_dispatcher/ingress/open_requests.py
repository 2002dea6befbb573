"""Requests whose clients wait: what each has been told, and what a reply means to it."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterator

import msgspec

from collm_common.errors import Overloaded
from collm_common.messages import Delta, Done, Failed, Lost, Reply, Request
from collm_common.types import AdapterRef

REMEMBERED = 4096


class Again:
    """The request must be appended anew: its replica or a part of its replies is gone."""


Told = Delta | Done | Failed | Again


class Open:
    """One request. Everything in `told` has passed the checks: in order, no repeats, newest attempt only."""

    def __init__(self, request: Request, stream: str) -> None:
        self.request, self.stream = request, stream
        self.entry_id = ""
        self.told: asyncio.Queue[Told] = asyncio.Queue()
        self.tokens: list[int] = []
        self.adapter: AdapterRef | None = None
        self.finish: str | None = None
        self.ended = False

    def take(self, reply: Reply) -> None:
        """A reply of the newest attempt, or one that is dropped."""
        if self.ended or reply.attempt != self.request.attempt:
            return
        match reply:
            case Delta():
                self._take_delta(reply)
            case Lost():
                self.again()
            case Done() | Failed():
                self.ended = True
                self.told.put_nowait(reply)

    def again(self) -> None:
        """From here on another attempt counts; it continues after what the client has seen, with the same version.

        An answer whose text has ended is complete: only what follows it (timings, quality) is lost.
        """
        if self.ended:
            return
        if self.finish is not None:
            self.ended = True
            self.told.put_nowait(Done(self.request.id, self.request.attempt, len(self.tokens), 0.0, 0.0, 0.0))
            return
        version = self.adapter.version if self.adapter is not None else self.request.version
        self.request = msgspec.structs.replace(
            self.request, attempt=self.request.attempt + 1, prefix=tuple(self.tokens), version=version
        )
        self.told.put_nowait(Again())

    def _take_delta(self, delta: Delta) -> None:
        if delta.offset < len(self.tokens) or self.finish is not None:
            return
        if delta.offset > len(self.tokens):
            self.again()
            return
        self.tokens += delta.tokens
        self.adapter, self.finish = delta.adapter or self.adapter, delta.finish
        self.told.put_nowait(delta)


class OpenRequests:
    """All of one ingress; at most `max_per_stream` of one stream."""

    def __init__(self, max_per_stream: int, retry_after_s: float) -> None:
        self._max, self._retry_after_s = max_per_stream, retry_after_s
        self._open: dict[str, Open] = {}
        self._counts: Counter[str] = Counter()
        self._left: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Open]:
        return iter(list(self._open.values()))

    def add(self, open_: Open) -> None:
        """Raises Overloaded when the stream is full."""
        if self._counts[open_.stream] >= self._max:
            raise Overloaded(
                f"{self._max} requests of this model and objective are open, which is the limit",
                retry_after_s=self._retry_after_s,
            )
        self._counts[open_.stream] += 1
        self._open[open_.request.id] = open_

    def remove(self, open_: Open, *, left: bool) -> None:
        """It ended, or its client `left`: then a late reply tells that a cancellation was missed."""
        if self._open.pop(open_.request.id, None) is None:
            return
        self._counts[open_.stream] -= 1
        if not self._counts[open_.stream]:
            del self._counts[open_.stream]
        if left:
            self._left[open_.request.id] = open_.request.model
            while len(self._left) > REMEMBERED:
                self._left.popitem(last=False)

    def take(self, reply: Reply) -> str | None:
        """Pass a reply on; returns the model whose replicas must be told to cancel, if its client has left."""
        if (open_ := self._open.get(reply.id)) is not None:
            open_.take(reply)
        elif isinstance(reply, Delta):
            return self._left.pop(reply.id, None)
        return None
