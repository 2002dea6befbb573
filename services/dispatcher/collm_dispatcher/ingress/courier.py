"""The ingress's side of Redis: requests out, replies in, cancellations."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from collm_common import messages, post, streams
from collm_common.broker import patiently
from collm_common.clock import Clock, ticks
from collm_common.errors import MessageError, Unavailable
from collm_common.keys import Keys
from collm_common.messages import Cancel, Replies
from collm_common.requeue import GROUP
from collm_common.retry import forever
from collm_common.streams import Tail, order
from collm_common.trouble import fault
from collm_dispatcher.cell import Cell
from collm_dispatcher.ingress.open_requests import Open, OpenRequests
from collm_dispatcher.originals import Bounds, Originals

log = logging.getLogger(__name__)
READ_COUNT = 512
DROP_S = 1.0
SEEK_COUNT = 256
APPEND_S = 10.0
WATCH_S = 0.5
LEASE_S = 60.0
REFUSES = "the broker takes nothing now"


class Courier:
    """`ingress` is the name replies are addressed to, new with every process."""

    def __init__(
        self, redis: Redis, keys: Keys, ingress: str, cell: Cell, opened: OpenRequests, bounds: Bounds, clock: Clock
    ) -> None:
        self._redis, self._keys, self.ingress, self._cell, self._clock = redis, keys, ingress, cell, clock
        self._opened, self._bounds = opened, bounds
        self._originals, self._read = Originals(redis, keys), "0-0"

    async def announce(self, model: str, slo: str) -> None:
        """Make a stream known before its first request."""
        await self._originals.announce(model, slo)

    async def send(self, opened: Sequence[Open], *, configured: bool) -> None:
        """Append new requests of one stream within the bounds. Raises Overloaded, InvalidRequest, Damaged, BrokerError.

        A broker that is away is waited for; one that says it has no room is not: Unavailable.
        """
        requests = [open_.request for open_ in opened]

        async def append() -> list[str]:
            try:
                return await self._originals.append(requests, self._bounds, configured=configured)
            except ResponseError as error:
                if fault(error):
                    raise
                retry_after_s = self._bounds.retry_after_s
                raise Unavailable(REFUSES, code="broker_refuses", retry_after_s=retry_after_s) from error

        entry_ids = await patiently(append, APPEND_S, self._clock)
        for open_, entry_id in zip(opened, entry_ids, strict=True):
            open_.appended(entry_id, self._clock.monotonic())

    async def send_again(self, open_: Open) -> None:
        """Append another attempt: who was accepted once is not refused for want of room. Raises BrokerError."""
        append = partial(self._originals.append, [open_.request])
        (entry_id,) = await patiently(append, APPEND_S, self._clock)
        open_.appended(entry_id, self._clock.monotonic())

    async def cancel(self, open_: Open) -> None:
        """Take it out of its stream, or tell the replicas if it is not there any more."""
        moved = True
        if open_.entry_id:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.xack(open_.stream, GROUP, open_.entry_id)
                pipe.xdel(open_.stream, open_.entry_id)
                moved = not (await pipe.execute())[1]
        if moved:
            await self._tell_cancel(open_.request.id, open_.request.model)

    async def run(self) -> None:
        """Receive replies for ever; what was received is of no use to anybody and takes the broker's memory."""
        key = self._keys.replies(self.ingress)
        tail = Tail(self._redis, key)
        await tail.start("0")
        dropped_s = self._clock.monotonic()

        async def step() -> None:
            nonlocal dropped_s
            for entry in await tail.read(READ_COUNT):
                await self._receive(entry)
            self._read = tail.positions[key]
            if self._clock.monotonic() - dropped_s > DROP_S:
                dropped_s = self._clock.monotonic()
                await tail.drop_read()

        await forever("replies", step, self._clock)

    async def watch(self) -> None:
        """For ever: every open request goes out again when the broker may have lost it.

        A restarted broker may have lost its last second, one that lost this ingress's lease has lost everything,
        unless the lease had time to run out: a broker that is full refuses to renew it.
        """
        known, lease, renewed_s = "", self._keys.lease(self.ingress), self._clock.monotonic()

        async def step() -> None:
            nonlocal known, renewed_s
            async for _ in ticks(WATCH_S, self._clock):
                run_id = str((await self._redis.info("server"))["run_id"])
                remembers = await self._redis.set(lease, run_id, px=round(LEASE_S * 1000), get=True)
                ran_out = self._clock.monotonic() - renewed_s >= LEASE_S
                if known and (run_id != known or not (remembers or ran_out)):
                    log.warning("the broker may have lost requests: %d go out again", len(self._opened))
                    for open_ in self._opened:
                        open_.again()
                known, renewed_s = run_id, self._clock.monotonic()

        await forever("broker", step, self._clock)

    async def seek(self, silent_s: float) -> None:
        """For ever: a request of which nothing was heard for so long and that is nowhere goes out again.

        Its stream was deleted, or the entry that told of its end.
        """

        async def step() -> None:
            async for _ in ticks(silent_s / 2, self._clock):
                silent = self._opened.silent(self._clock.monotonic() - silent_s)
                for start in range(0, len(silent), SEEK_COUNT):
                    for open_ in await self._missing(silent[start : start + SEEK_COUNT]):
                        log.warning("request %s is nowhere: it goes out again", open_.request.id)
                        open_.again()

        await forever("seeking", step, self._clock)

    async def _missing(self, opened: Sequence[Open]) -> list[Open]:
        places = [(open_.stream, open_.entry_id, open_.request.id) for open_ in opened]
        missing, last = await self._originals.missing(places, list(self._cell.members), self.ingress)
        if order(self._read) < order(last):
            return []
        return [opened[number] for number in missing if opened[number].entry_id == places[number][1]]

    async def _receive(self, entry: streams.Entry) -> None:
        try:
            message = messages.decode_as(Replies, entry.data)
        except MessageError as error:
            log.error("dropping reply %s: %s", entry.entry_id, error)
            return
        for reply in message.items:
            if (model := self._opened.take(reply, self._clock.monotonic())) is not None:
                await self._tell_cancel(reply.id, model)

    async def _tell_cancel(self, request_id: str, model: str) -> None:
        for member in self._cell.of(model):
            if member.info.alive:
                await post.command(self._redis, self._keys, member.info.id, Cancel(id=request_id), request_id)
