"""Several asynchronous generators read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Every item with its source's place, as they come; the first error ends all. Afterwards the sources are closed."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    waiting = {asyncio.ensure_future(anext(source)): place for place, source in enumerate(sources)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                place = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                yield place, item
                waiting[asyncio.ensure_future(anext(sources[place]))] = place
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for source in sources:
            await source.aclose()
