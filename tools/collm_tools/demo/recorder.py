"""Writes down what the events and telemetry streams say while the demo plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
from redis.asyncio import Redis

from collm_common import messages
from collm_common.broker import AWAY
from collm_common.clock import checkpoint
from collm_common.errors import CollmError
from collm_common.keys import Keys
from collm_common.messages import Event, InferenceReport, TrainReport
from collm_common.streams import Tail

LIMIT = 200_000
READ_COUNT = 1000
AWAY_PAUSE_S = 0.5


class Recorder:
    """`run` in a task; the lists grow as things happen, up to LIMIT messages each."""

    def __init__(self, redis: Redis, keys: Keys, on_event: Callable[[Event], None] = lambda event: None) -> None:
        self.events: list[Event] = []
        self.reports: list[InferenceReport] = []
        self.training: list[TrainReport] = []
        self._tail = Tail(redis, keys.events, keys.telemetry)
        self._on_event = on_event

    async def run(self) -> None:
        """From the beginning of both streams, until cancelled. A broker that is away is waited for."""
        while True:
            checkpoint()
            try:
                await self._tail.start("0")
                entries = await self._tail.read(READ_COUNT)
            except AWAY:
                await asyncio.sleep(AWAY_PAUSE_S)
                continue
            for entry in entries:
                self.note(messages.decode(entry.data))

    def note(self, message: messages.AnyMessage) -> None:
        """File one message. Raises CollmError when there are more than a demo can have."""
        if isinstance(message, InferenceReport):
            self.reports.append(message)
        elif isinstance(message, TrainReport):
            self.training.append(message)
        elif isinstance(message, Event):
            self.events.append(message)
            self._on_event(message)
        if max(len(self.events), len(self.reports), len(self.training)) > LIMIT:
            raise CollmError(f"more than {LIMIT} messages of one sort in a demo")

    def save(self, path: Path) -> None:
        """All messages as JSON lines, by time."""
        everything: list[Event | InferenceReport | TrainReport] = [*self.events, *self.reports, *self.training]
        lines = [msgspec.json.encode(message) for message in sorted(everything, key=lambda message: message.time_s)]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
