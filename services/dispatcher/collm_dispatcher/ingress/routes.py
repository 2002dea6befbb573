"""HTTP: the routes, how errors look, and server-sent events."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, Protocol

from aiohttp import web

from collm_common import logs
from collm_common.broker import AWAY
from collm_common.errors import InternalError, RequestError, Unavailable, UnknownModel
from collm_common.messages import Delta
from collm_common.tracing import UNTRACED, Tracer
from collm_common.trouble import TROUBLES, fault
from collm_dispatcher.ingress import openapi, render
from collm_dispatcher.ingress.answer import Answers
from collm_dispatcher.ingress.body import ChatBody, CompletionBody, StreamOptions, parse
from collm_dispatcher.ingress.directory import Directory
from collm_dispatcher.ingress.exchange import Events, read_body
from collm_dispatcher.ingress.gate import Gate
from collm_dispatcher.ingress.metrics import Metrics
from collm_dispatcher.ingress.recent import Recent
from collm_dispatcher.ingress.response import Response
from collm_dispatcher.ingress.traces import Exchange, failure
from collm_dispatcher.ingress.upload import Uploads

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DROPPED = "x-llm-d-request-dropped-reason"


class Addable(Protocol):
    """Routes of one subject."""

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Add them."""


class Routes:
    """`others` have routes of their own. `ready` says whether requests can be served now.

    While `draining`, new ones are refused.
    """

    def __init__(
        self,
        answers: Answers,
        directory: Directory,
        uploads: Uploads,
        recent: Recent,
        others: Sequence[Addable],
        metrics: Metrics,
        gate: Gate,
        ready: Callable[[], Awaitable[bool]],
        max_body_bytes: int,
        retry_after_s: float,
        tracer: Tracer = UNTRACED,
    ) -> None:
        self._tracer = tracer
        self._answers, self._directory, self._uploads, self._metrics = answers, directory, uploads, metrics
        self._recent, self._others, self._gate = recent, others, gate
        self._ready, self._max_body, self._retry_after_s = ready, max_body_bytes, retry_after_s
        self._created = int(time.time())
        self.draining = False

    def app(self) -> web.Application:
        """With every route."""

        @web.middleware
        async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._answer_errors(request, handler)

        app = web.Application(client_max_size=self._max_body, middlewares=[errors])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_post("/v1/replicas/{id}/data", self._upload)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{id:.+}", self._model)
        for other in self._others:
            other.add_to(app.router)
        app.router.add_get("/openapi.json", self._openapi)
        app.router.add_get("/health", self._health)
        app.router.add_get("/ready", self._get_ready)
        app.router.add_get("/metrics", self._get_metrics)
        return app

    def any_ready(self) -> bool:
        """Whether a replica can answer now."""
        return self._directory.any_ready()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, ChatBody)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, CompletionBody)

    async def _complete(self, request: web.Request, kind: type[ChatBody] | type[CompletionBody]) -> web.StreamResponse:
        self._refuse_if_draining()
        data = await read_body(request, self._max_body)
        body = parse(ChatBody, data) if kind is ChatBody else parse(CompletionBody, data)
        caller = await self._gate.caller(request)
        exchange = Exchange(self._tracer, request, body)
        try:
            response = await self._answers.accept(body, request.headers, caller, exchange.append())
            exchange.accepted(response)
            told = await self._answer(request, body, response)
        except BaseException as error:
            exchange.end(*failure(error))
            raise
        exchange.end(told.status)
        return told

    async def _answer(
        self, request: web.Request, body: ChatBody | CompletionBody, response: Response
    ) -> web.StreamResponse:
        about = logs.request_id.set(response.id)
        try:
            told = await (self._stream(request, body, response) if body.stream else self._whole(response))
            self._recent.keep(body, response)
            return told
        finally:
            await self._answers.close(response)
            logs.request_id.reset(about)
            await self._gate.spend(request, response.usage()["total_tokens"])

    async def _whole(self, response: Response) -> web.Response:
        async with aclosing(self._answers.follow(response)) as deltas:
            async for index, delta in deltas:
                response.take(index, delta)
        return web.json_response(response.whole())

    async def _stream(
        self, request: web.Request, body: ChatBody | CompletionBody, response: Response
    ) -> web.StreamResponse:
        """Headers go out with the first token, so that an earlier error keeps its status."""
        events = Events(request)
        try:
            async with aclosing(self._answers.follow(response)) as deltas:
                await self._chunks(
                    deltas, events, body.stream_options or StreamOptions(), response, bool(body.reference)
                )
        except RequestError as error:
            if not events.started:
                raise
            self._metrics.rejected.labels(error.code).inc()
            await events.send(render.error_body(error))
            return await events.end()
        except ConnectionResetError:
            log.info("request %s: its client left", response.id)
            return events.response
        return await events.end()

    async def _chunks(
        self,
        deltas: AsyncGenerator[tuple[int, Delta], None],
        events: Events,
        options: StreamOptions,
        response: Response,
        wants_quality: bool,
    ) -> None:
        shape, shown = response.shape, dict[int, int]()
        async for index, delta in deltas:
            chunks = [first] if index not in shown and (first := shape.first(index, delta)) is not None else []
            offset = shown.setdefault(index, 0)
            response.take(index, delta)
            if delta.text or delta.logprobs:
                chunks.append(shape.delta(index, delta, offset))
                shown[index] += shape.width(delta)
            if delta.finish is not None:
                chunks.append(shape.finish(index, delta.finish))
            counts = self._counts(options, response)
            await events.send(*(chunk | counts for chunk in chunks))
        if options.include_usage or wants_quality:
            total = response.usage() if options.include_usage else None
            await events.send(shape.last(total, response.extension()))

    @staticmethod
    def _counts(options: StreamOptions, response: Response) -> dict[str, Any]:
        """What a chunk before the last says of usage."""
        if options.continuous_usage_stats:
            return {"usage": response.usage()}
        return {"usage": None} if options.include_usage else {}

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        self._refuse_if_draining()
        return await self._uploads.handle(request)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        hidden = await self._gate.hidden(request)
        return web.json_response({"object": "list", "data": self._directory.listing(self._created, hidden)})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["id"]
        for entry in self._directory.listing(self._created, await self._gate.hidden(request)):
            if entry["id"] == name:
                return web.json_response(entry)
        raise UnknownModel(f"no model or adapter {name!r}", param="model")

    async def _openapi(self, _: web.Request) -> web.StreamResponse:
        return web.json_response(openapi.document())

    async def _health(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def _get_ready(self, _: web.Request) -> web.StreamResponse:
        if self.draining or not self._directory.any_ready() or not await self._ready():
            raise Unavailable("not ready", code="not_ready", retry_after_s=self._retry_after_s)
        return web.json_response({"status": "ready"})

    async def _get_metrics(self, _: web.Request) -> web.StreamResponse:
        return web.Response(body=self._metrics.page(), headers={"Content-Type": "text/plain; version=0.0.4"})

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise Unavailable("shutting down", code="rejected-shutting-down", retry_after_s=self._retry_after_s)

    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            async with self._gate.passing(request):
                return await handler(request)
        except RequestError as error:
            return self._refusal(request, error)
        except web.HTTPException as error:
            refusal = RequestError(error.reason, code="not_found" if error.status == 404 else "http_error")
            refusal.status, refusal.type = error.status, "invalid_request_error"
            allow = error.headers.get("Allow")
            return self._refusal(request, refusal, {"Allow": allow} if allow else {})
        except AWAY as error:
            TROUBLES.tell(request.path, error)
            if fault(error):
                return self._refusal(request, InternalError("the broker refuses", code="broker_fault"))
            return self._refusal(
                request, Unavailable("the broker is away", code="broker_away", retry_after_s=self._retry_after_s)
            )
        except Exception:
            log.exception("%s failed", request.path)
            return self._refusal(request, InternalError("internal error"))

    def _refusal(
        self, request: web.Request, error: RequestError, headers: Mapping[str, str] = MappingProxyType({})
    ) -> web.Response:
        if request.method == "POST":
            self._metrics.rejected.labels(error.code).inc()
        told = {**headers, **({DROPPED: error.code} if error.status in (429, 503) else {})}
        if error.retry_after_s is not None:
            told["Retry-After"] = str(max(1, round(error.retry_after_s)))
        response = web.json_response(render.error_body(error), status=error.status, headers=told)
        if request.content.exception() is not None or not request.content.is_eof():
            # The line is closed behind a body that nobody can read to its end: its client must not use it again.
            response.force_close()
        return response
