"""What the ingress's spans say of an HTTP request, by the semantic conventions for generative AI."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from collm_common.errors import RequestError
from collm_common.tracing import UNTRACED, Span, Tracer, Value
from collm_dispatcher.ingress.body import ChatBody, CompletionBody
from collm_dispatcher.ingress.response import Response

HEADER = "traceparent"
APPEND: Mapping[str, Value] = {"messaging.system": "redis", "messaging.operation.type": "send"}


class Exchange:
    """One completion on its way: a server's span around everything, and a producer's around what goes to Redis."""

    def __init__(self, tracer: Tracer, request: web.Request, body: ChatBody | CompletionBody) -> None:
        self._tracer = tracer
        self._span: Span = UNTRACED if tracer is UNTRACED else self._begin(request, body)
        self._response: Response | None = None

    def append(self) -> Span:
        """Around the append; its traceparent goes with the messages."""
        return self._tracer.begin("send request", "producer", self._span.parent, APPEND)

    def accepted(self, response: Response) -> None:
        """It has requests of its own now."""
        self._response = response

    def end(self, status: int, error: str = "") -> None:
        """The client has all that it will get."""
        if self._tracer is UNTRACED:
            return
        told: dict[str, Value] = {"http.response.status_code": status}
        if self._response is not None:
            usage = self._response.usage()
            finishes = tuple(answer.open.finish for answer in self._response.answers if answer.open.finish)
            told |= {
                "gen_ai.response.id": self._response.id,
                "gen_ai.response.finish_reasons": finishes,
                "gen_ai.usage.input_tokens": usage["prompt_tokens"],
                "gen_ai.usage.output_tokens": usage["completion_tokens"],
            }
        self._span.end(told, error)

    def _begin(self, request: web.Request, body: ChatBody | CompletionBody) -> Span:
        operation = "chat" if isinstance(body, ChatBody) else "text_completion"
        asked = {
            "gen_ai.request.max_tokens": body.max_completion_tokens or body.max_tokens,
            "gen_ai.request.temperature": body.temperature,
            "gen_ai.request.top_p": body.top_p,
            "gen_ai.request.seed": body.seed,
            "gen_ai.request.choice.count": body.n,
        }
        about: dict[str, Value] = {name: value for name, value in asked.items() if value is not None}
        about |= {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "collm",
            "gen_ai.request.model": body.model,
            "gen_ai.request.stream": bool(body.stream),
            "http.request.method": request.method,
            "http.route": request.path,
        }
        return self._tracer.begin(f"{operation} {body.model}", "server", request.headers.get(HEADER, ""), about)


def failure(error: BaseException) -> tuple[int, str]:
    """Status and kind of whatever ended an exchange; a client that left has none of HTTP's own."""
    if isinstance(error, RequestError):
        return error.status, error.code
    return (500, type(error).__name__) if isinstance(error, Exception) else (499, "client_left")
