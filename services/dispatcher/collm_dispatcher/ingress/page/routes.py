"""What a browser asks for: the page's files, and the feed once or for ever."""

from __future__ import annotations

from importlib import resources

from aiohttp import web

from collm_common.broker import AWAY
from collm_common.clock import Clock, ticks
from collm_common.errors import Overloaded
from collm_dispatcher.ingress.exchange import Events
from collm_dispatcher.ingress.page.feed import EVERY_S, Feed

MOST_VIEWERS = 64
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
FILES = ("page.css", "page.js", "charts.js", "dom.js")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class LivePage:
    """`/` and what it loads; at most `MOST_VIEWERS` streams are open at a time."""

    def __init__(self, feed: Feed, clock: Clock) -> None:
        self._feed, self._clock, self._viewers = feed, clock, 0
        folder = resources.files(__package__) / "static"
        self._files = {name: (folder / name).read_text(encoding="utf-8") for name in ("page.html", *FILES)}

    def add_to(self, app: web.Application) -> None:
        """Every route; before the application is set up."""
        app.router.add_get("/", self._front)
        app.router.add_get("/live/state", self._state)
        app.router.add_get("/live/stream", self._stream)
        app.router.add_get("/live/{name}", self._file)

    async def _front(self, _: web.Request) -> web.StreamResponse:
        return self._sent("page.html")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        if (name := request.match_info["name"]) not in FILES:
            raise web.HTTPNotFound
        return self._sent(name)

    def _sent(self, name: str) -> web.Response:
        type_ = TYPES[name.rpartition(".")[2]]
        return web.Response(text=self._files[name], content_type=type_, charset="utf-8", headers=HEADERS)

    async def _state(self, _: web.Request) -> web.StreamResponse:
        body = await self._feed.page()
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self._viewers >= MOST_VIEWERS:
            raise Overloaded(f"{MOST_VIEWERS} browsers are watching, which is the limit")
        events = Events(request)
        self._viewers += 1
        try:
            async for _ in ticks(EVERY_S, self._clock):
                await events.text(await self._next())
        except ConnectionResetError:
            return events.response
        finally:
            self._viewers -= 1
        return events.response

    async def _next(self) -> str:
        """The view, or null while the broker is away."""
        try:
            return (await self._feed.page()).decode()
        except AWAY:
            return "null"
