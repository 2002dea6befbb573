"""The last answers and what they answered, for as long as feedback may follow; in this process's memory alone."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from msgspec import Struct

from collm_common.clock import Clock
from collm_dispatcher.ingress.body import ChatBody, CompletionBody
from collm_dispatcher.ingress.response import Response

LEARNT_ROLES = frozenset({"system", "user", "assistant"})
OVERHEAD_BYTES = 512


class Kept(Struct, frozen=True):
    """`asked` is the conversation as chat messages, or a bare prompt; `replica` served it."""

    tenant: str
    replica: str
    asked: list[dict[str, str]] | str
    answer: str
    at_s: float

    @property
    def size(self) -> int:
        """Bytes, about."""
        turns = [self.asked] if isinstance(self.asked, str) else [turn["content"] for turn in self.asked]
        return OVERHEAD_BYTES + 4 * sum(map(len, (*turns, self.answer)))

    def sample(self, answer: str) -> bytes:
        """As a line of training data, with that answer."""
        row: dict[str, Any]
        if isinstance(self.asked, str):
            row = {"prompt": self.asked, "completion": answer}
        else:
            row = {"messages": [*self.asked, {"role": "assistant", "content": answer}]}
        return json.dumps(row).encode() + b"\n"


class Recent:
    """At most `max_bytes`, the oldest give way, and none stays longer than `keep_s`."""

    def __init__(self, max_bytes: int, keep_s: float, clock: Clock) -> None:
        self._max_bytes, self._keep_s, self._clock = max_bytes, keep_s, clock
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, body: ChatBody | CompletionBody, response: Response) -> None:
        """A whole single answer to something that can be learnt, unless `store` is false."""
        answer, asked = response.answers[0], _asked(body)
        if body.store is False or len(response.answers) > 1 or asked is None:
            return
        if answer.done is None or not answer.done.replica:
            return
        self.put(
            response.id,
            Kept(answer.open.request.tenant, answer.done.replica, asked, response.text, self._clock.monotonic()),
        )

    def find(self, id_: str, tenant: str) -> Kept | None:
        """What is kept of a request of that tenant."""
        self._forget_old()
        kept = self._kept.get(id_)
        return kept if kept is not None and kept.tenant == tenant else None

    def forget(self, id_: str, tenant: str) -> None:
        """No feedback on it any more."""
        if self.find(id_, tenant) is not None:
            self._bytes -= self._kept.pop(id_).size

    def put(self, id_: str, kept: Kept) -> None:
        """Keep it, if it fits at all."""
        self._forget_old()
        if (earlier := self._kept.pop(id_, None)) is not None:
            self._bytes -= earlier.size
        self._kept[id_] = kept
        self._bytes += kept.size
        while self._bytes > self._max_bytes:
            self._bytes -= self._kept.popitem(last=False)[1].size

    def _forget_old(self) -> None:
        since_s = self._clock.monotonic() - self._keep_s
        while self._kept and next(iter(self._kept.values())).at_s < since_s:
            self._bytes -= self._kept.popitem(last=False)[1].size


def _asked(body: ChatBody | CompletionBody) -> list[dict[str, str]] | str | None:
    """None for tokens, and for turns that training data cannot have."""
    if isinstance(body, CompletionBody):
        return body.prompt if isinstance(body.prompt, str) else None
    turns = body.conversation()
    learnt = all(turn["role"] in LEARNT_ROLES and turn["content"] for turn in turns)
    return turns if learnt else None
