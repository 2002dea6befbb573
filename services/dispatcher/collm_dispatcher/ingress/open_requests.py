"""Requests whose clients wait: what each has been told, and what a reply means to it."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

import msgspec

from collm_common.errors import Overloaded
from collm_common.messages import Delta, Done, Failed, Lost, Reply, Request
from collm_common.types import AdapterRef
from collm_dispatcher.ingress.inbox import Again, Inbox

REMEMBERED = 4096


class Open:
    """One request. Everything in `told` has passed the checks: in order, no repeats, newest attempt only."""

    def __init__(self, request: Request, stream: str) -> None:
        self.request, self.stream = request, stream
        self.entry_id = ""
        self.told = Inbox()
        self.tokens: list[int] = []
        self.adapter: AdapterRef | None = None
        self.finish: str | None = None
        self.ended = False
        self.heard_s = 0.0
        self._scored_elsewhere = False

    def appended(self, entry_id: str, now_s: float) -> None:
        """Its entry is in its stream; `now_s` is monotonic."""
        self.entry_id, self.heard_s = entry_id, now_s

    def unscored(self) -> Done:
        """The end of an answer whose text is complete, for want of a better one."""
        return Done(self.request.id, self.request.attempt, len(self.tokens), 0.0, 0.0, 0.0)

    def take(self, reply: Reply) -> None:
        """A reply of the newest attempt, or one that is dropped."""
        if self.ended or reply.attempt != self.request.attempt:
            return
        match reply:
            case Delta():
                self._take_delta(reply)
            case Lost():
                self.again()
            case Done() if self._scored_elsewhere:
                self._end(msgspec.structs.replace(reply, quality=None))
            case Done() | Failed():
                self._end(reply)

    def again(self) -> None:
        """From here on another attempt counts; it continues after what the client has seen, with the same version.

        An answer whose text has ended goes out again only to be scored: its prefix is the whole of it.
        """
        if self.ended:
            return
        if self.finish is not None and not self.request.reference:
            self._end(self.unscored())
            return
        self.entry_id = ""
        version = self.adapter.version if self.adapter is not None else self.request.version
        self.request = msgspec.structs.replace(
            self.request, attempt=self.request.attempt + 1, prefix=tuple(self.tokens), version=version
        )
        self.told.put(Again())

    def _end(self, reply: Done | Failed) -> None:
        self.ended = True
        self.told.put(reply)

    def _take_delta(self, delta: Delta) -> None:
        if self.finish is not None:
            # Of an attempt that only scores: a score under another version says nothing about this answer.
            self._scored_elsewhere |= delta.adapter != self.adapter
        if delta.offset < len(self.tokens) or self.finish is not None:
            return
        if delta.offset > len(self.tokens):
            self.again()
            return
        self.tokens += delta.tokens
        self.adapter, self.finish = delta.adapter or self.adapter, delta.finish
        self.told.put(delta)


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

    def silent(self, since_s: float) -> list[Open]:
        """Those that are in Redis and of which nothing was heard since then (monotonic)."""
        return [open_ for open_ in self if open_.entry_id and not open_.ended and open_.heard_s < since_s]

    def take(self, reply: Reply, now_s: float) -> str | None:
        """Pass a reply on; returns the model whose replicas must be told to cancel, if its client has left."""
        if (open_ := self._open.get(reply.id)) is not None:
            open_.heard_s = now_s
            open_.take(reply)
        elif isinstance(reply, Delta):
            return self._left.pop(reply.id, None)
        return None
