"""What clients say of answers: training data, straight to the replica that served, and nowhere else."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import aiohttp
from aiohttp import web
from msgspec import Meta, Struct

from collm_common.errors import InvalidRequest, RequestError
from collm_dispatcher.cell import Cell
from collm_dispatcher.ingress.body import parse
from collm_dispatcher.ingress.exchange import read_body
from collm_dispatcher.ingress.gate import tenant
from collm_dispatcher.ingress.metrics import Metrics
from collm_dispatcher.ingress.recent import Recent
from collm_dispatcher.ingress.shares import place, remove, send

TIMEOUT = aiohttp.ClientTimeout(total=30.0)


class FeedbackBody(Struct):
    """POST /v1/feedback: `id` is that of the answer; `answer` is a better one.

    An answer rated good is learnt as it was; of one rated bad, without a better one, nothing is kept.
    """

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    answer: Annotated[str, Meta(min_length=1, max_length=200_000)] | None = None
    rating: Literal["good", "bad"] | None = None


class UnknownAnswer(RequestError):
    """It was never given here, is too old, or is not to be learnt from."""

    status = 404
    type = "invalid_request_error"
    code = "answer_not_found"


class Feedback:
    """POST /v1/feedback, DELETE /v1/feedback/{id}. A later word on the same answer replaces the earlier one."""

    def __init__(self, recent: Recent, cell: Cell, metrics: Metrics, max_bytes: int) -> None:
        self._recent, self._cell, self._metrics, self._max_bytes = recent, cell, metrics, max_bytes

    def add_to(self, router: web.UrlDispatcher) -> None:
        """Its routes."""
        router.add_post("/v1/feedback", self._take)
        router.add_delete("/v1/feedback/{id}", self._delete)

    async def _take(self, request: web.Request) -> web.StreamResponse:
        body = parse(FeedbackBody, await read_body(request, self._max_bytes))
        if body.answer is None and body.rating is None:
            raise InvalidRequest("answer: a better answer or a rating is missing", param="answer")
        id_, who = _bare(body.id), tenant(request)
        kept = self._recent.find(id_, who)
        if kept is None:
            raise UnknownAnswer(
                f"no answer {body.id!r} that feedback may follow: it is unknown here, too old, or not to be stored",
                param="id",
            )
        where, query = place(self._cell, kept.replica), {"request": id_, "tenant": who}
        answer = body.answer if body.answer is not None else kept.answer if body.rating == "good" else ""
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
            if answer:
                await send(session, where, kept.sample(answer), query, field="answer")
            else:
                await remove(session, where, query)
        self._metrics.feedback.labels("corrected" if body.answer is not None else str(body.rating)).inc()
        return web.json_response({"id": body.id, "object": "feedback", "stored": bool(answer)})

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        """On every replica, or nothing is confirmed: whoever asks may have come to another ingress than the answer."""
        asked, who = request.match_info["id"], tenant(request)
        id_ = _bare(asked)
        self._recent.forget(id_, who)
        places = [place(self._cell, name) for name in self._cell.members]
        query = {"request": id_, "tenant": who}
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
            counts = await asyncio.gather(*(remove(session, each, query) for each in places))
        if sum(counts):
            self._metrics.feedback.labels("deleted").inc()
        return web.json_response({"id": asked, "object": "feedback.deleted", "deleted": sum(counts) > 0})


def _bare(id_: str) -> str:
    """The request's id in an answer's."""
    return id_.removeprefix("chatcmpl-").removeprefix("cmpl-")
