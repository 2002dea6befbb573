"""What a client has not been told yet."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from collm_common.messages import Delta, Done, Failed

MOST = 64


class Again:
    """The request must be appended anew: its replica or a part of its replies is gone."""


Told = Delta | Done | Failed | Again


class Inbox:
    """In order, at most about `MOST` pieces: to a slow client more of the answer goes in one."""

    def __init__(self) -> None:
        self._pieces: deque[Told] = deque()
        self._there = asyncio.Event()

    def __len__(self) -> int:
        return len(self._pieces)

    def put(self, told: Told) -> None:
        """Behind all others, or joined to the last."""
        last = self._pieces[-1] if len(self._pieces) >= MOST else None
        if isinstance(last, Delta) and isinstance(told, Delta):
            self._pieces[-1] = _joined(last, told)
        else:
            self._pieces.append(told)
        self._there.set()

    async def get(self) -> Told:
        """The next one, as soon as there is one."""
        while not self._pieces:
            self._there.clear()
            await self._there.wait()
        return self._pieces.popleft()


def _joined(first: Delta, second: Delta) -> Delta:
    return msgspec.structs.replace(
        first,
        tokens=first.tokens + second.tokens,
        text=first.text + second.text,
        adapter=second.adapter or first.adapter,
        finish=second.finish,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
    )
