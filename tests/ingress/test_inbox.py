"""What waits for a client that reads slowly."""

from __future__ import annotations

import asyncio

from collm_common.messages import Delta, Done
from collm_dispatcher.ingress.inbox import MOST, Again, Inbox


async def test_a_slow_client_gets_the_same_answer_in_few_pieces() -> None:
    """A client that reads nothing, and a piece in memory for each token of its answer; or one that is lost or moved."""
    inbox = Inbox()
    for n in range(1000):
        inbox.put(Delta("q", 0, n, (n,), f"{n} ", None, "length" if n == 999 else None))
    assert len(inbox) == MOST
    inbox.put(Again())
    inbox.put(Done("q", 0, 1000, 0.0, 0.0, 0.0))
    pieces = [await inbox.get() for _ in range(len(inbox))]
    deltas = [piece for piece in pieces if isinstance(piece, Delta)]
    assert [type(piece) for piece in pieces[-2:]] == [Again, Done]
    assert [token for delta in deltas for token in delta.tokens] == list(range(1000))
    assert "".join(delta.text for delta in deltas) == "".join(f"{n} " for n in range(1000))
    assert [delta.offset for delta in deltas] == list(range(MOST))
    assert [delta.finish for delta in deltas] == [None] * (MOST - 1) + ["length"]


async def test_who_waits_is_woken_by_the_next_piece() -> None:
    """A client that hangs although its answer is there."""
    inbox = Inbox()
    waiting = asyncio.create_task(inbox.get())
    await asyncio.sleep(0)
    inbox.put(Again())
    assert isinstance(await asyncio.wait_for(waiting, 5), Again)
