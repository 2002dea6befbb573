"""A TCP proxy between a service and its broker that can cut, delay and withhold what passes."""

from __future__ import annotations

import asyncio
from contextlib import suppress

CHUNK = 65_536


class Proxy:
    """Listens on `port` of the loopback address and forwards to `target_port`."""

    def __init__(self, target_port: int) -> None:
        self.target_port, self.port = target_port, 0
        self.delay_s = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._links: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def start(self) -> None:
        """Choose a port and listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Reset every connection that is open now; new ones are served."""
        for writer in list(self._links.values()):
            writer.transport.abort()

    def withhold(self) -> None:
        """Let nothing through, in either direction, and break no connection, until `let_through`."""
        self._open.clear()

    def let_through(self) -> None:
        """Deliver what was withheld, in order, and all that follows."""
        self._open.set()

    async def close(self) -> None:
        """End all connections and stop listening."""
        if self._server is not None:
            self._server.close()
        for task in list(self._links):
            task.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links[task] = writer
        try:
            with suppress(OSError, asyncio.CancelledError):
                await self._join(reader, writer)
        finally:
            writer.transport.abort()
            del self._links[task]

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both directions, until either ends."""
        there, back = await asyncio.open_connection("127.0.0.1", self.target_port)
        ways = {asyncio.create_task(self._pump(reader, back)), asyncio.create_task(self._pump(there, writer))}
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            back.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(CHUNK):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            await self._open.wait()
            sink.write(data)
            await sink.drain()
