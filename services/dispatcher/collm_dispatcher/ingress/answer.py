"""One request from acceptance to its last token, whatever carries it to the client."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from collm_common.broker import AWAY
from collm_common.clock import Clock
from collm_common.errors import BrokerError, InvalidRequest, RequestError, Unavailable
from collm_common.keys import Keys
from collm_common.messages import Delta, Done, Failed, Request
from collm_dispatcher.ingress import objectives, render
from collm_dispatcher.ingress.body import ChatBody, CompletionBody
from collm_dispatcher.ingress.courier import Courier
from collm_dispatcher.ingress.directory import Directory
from collm_dispatcher.ingress.metrics import Metrics
from collm_dispatcher.ingress.open_requests import Again, Open, OpenRequests
from collm_dispatcher.ingress.render import Shape
from collm_dispatcher.ingress.tokenizing import Tokenizing
from collm_dispatcher.settings import DispatcherSettings

log = logging.getLogger(__name__)
COMPLETION_TOKENS = 16


class Answer:
    """An accepted request: its shape, what was measured of it, and the stream of what is told to its client."""

    def __init__(self, open_: Open, shape: Shape, metrics: Metrics, arrived_s: float) -> None:
        self.open, self.shape, self._metrics, self._arrived_s = open_, shape, metrics, arrived_s
        self.ttft_s: float | None = None
        self.e2e_s = self._last_s = 0.0
        self.done: Done | None = None
        model = open_.request.model
        metrics.waiting.labels(model).inc()
        metrics.offered.labels(model, open_.request.slo.name).inc()
        metrics.prompt_tokens.labels(model).inc(len(open_.request.prompt))

    @property
    def adapter(self) -> str | None:
        """The version that answers, `name@v3`."""
        return str(self.open.adapter) if self.open.adapter is not None else None

    @property
    def queue_s(self) -> float:
        """From arrival to the start of prefill."""
        return max(0.0, (self.ttft_s or 0.0) - (self.done.prefill_s if self.done else 0.0))

    def usage(self) -> dict[str, int]:
        """Tokens so far."""
        return render.usage(len(self.open.request.prompt), len(self.open.tokens))

    def extension(self) -> dict[str, Any]:
        """The `collm` object, once it is done."""
        assert self.done is not None
        return render.extension(self.done, self.adapter, self.queue_s)

    def saw(self, delta: Delta, now_s: float) -> None:
        """Measure one delta; `now_s` is monotonic."""
        since_s, model = now_s - self._arrived_s, self.open.request.model
        if self.ttft_s is None:
            self.ttft_s = since_s
            self._metrics.ttft.labels(model).observe(since_s)
            self._metrics.waiting.labels(model).dec()
            self._metrics.running.labels(model).inc()
        elif delta.tokens:
            self._metrics.itl.labels(model).observe((since_s - self._last_s) / len(delta.tokens))
        self._last_s = since_s
        if delta.finish is not None:
            self.e2e_s = since_s

    def close(self) -> None:
        """Account for how it ended."""
        request = self.open.request
        (self._metrics.waiting if self.ttft_s is None else self._metrics.running).labels(request.model).dec()
        if self.open.finish is None or self.ttft_s is None:
            self._metrics.missed(request.model, request.slo)
            return
        self._metrics.queue.labels(request.model).observe(self.queue_s)
        tokens = len(self.open.tokens)
        self._metrics.finished(request.model, request.slo, self.ttft_s, self.e2e_s, tokens, self.open.finish)


class Answers:
    """Accepts requests and follows them."""

    def __init__(
        self,
        settings: DispatcherSettings,
        courier: Courier,
        opened: OpenRequests,
        directory: Directory,
        tokenizers: Mapping[str, Tokenizing],
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._settings, self._courier, self._opened, self._clock = settings, courier, opened, clock
        self._directory, self._tokenizers, self._metrics = directory, tokenizers, metrics
        self._keys: Keys = settings.keys
        self._classes = objectives.classes(settings.slo_classes)

    async def announce_classes(self) -> None:
        """Make the streams of every configured class known, so that their first request need not wait for that."""
        for model in self._tokenizers:
            for slo in self._classes:
                await self._courier.ensure_stream(model, slo, configured=True)

    async def accept(self, body: ChatBody | CompletionBody, headers: Mapping[str, str]) -> Answer:
        """Check, count, append. Raises RequestError; then nothing is open."""
        arrived_s, arrival_s = self._clock.monotonic(), self._clock.now()
        target = self._directory.find(body.model)
        slo = objectives.choose(self._classes, headers, body.slo)
        context = self._directory.context_tokens(target.model, self._settings.retry_after_s)
        text = self._tokenizers[target.model]
        prompt = await text.prompt(body)
        reference = await text.reference(body.reference) if body.reference else ()
        limit = self._limit(body, len(prompt), len(reference), context)
        request = Request(
            id=uuid.uuid4().hex,
            ingress=self._courier.ingress,
            model=target.model,
            adapter=target.adapter,
            version=target.version,
            prompt=prompt,
            reference=reference,
            sampling=body.sampling(limit, body.logprob_count),
            slo=slo,
            arrival_s=arrival_s,
            deadline_s=slo.deadline(arrival_s, limit),
        )
        open_ = await self._open(request)
        shape = Shape(
            chat=isinstance(body, ChatBody),
            id_=request.id,
            created=int(time.time()),
            model=body.model,
            with_logprobs=body.logprob_count is not None,
            text=text,
        )
        return Answer(open_, shape, self._metrics, arrived_s)

    async def follow(self, answer: Answer) -> AsyncGenerator[Delta, None]:
        """Every delta once, in order; `answer.done` is set at the end. Raises RequestError."""
        open_, loop = answer.open, asyncio.get_running_loop()
        end_s = loop.time() + self._settings.request_timeout_s
        while answer.done is None:
            try:
                async with asyncio.timeout_at(end_s):
                    told = await open_.told.get()
            except TimeoutError as error:
                raise TimedOut(f"no end after {self._settings.request_timeout_s:g} s") from error
            match told:
                case Delta():
                    answer.saw(told, self._clock.monotonic())
                    yield told
                case Again():
                    await self._again(open_)
                case Failed():
                    raise failure(told, self._settings.retry_after_s)
                case Done():
                    answer.done = told

    async def close(self, answer: Answer) -> None:
        """Afterwards nothing of it is left here or at a replica, whether it ended or not."""
        open_ = answer.open
        answer.close()
        self._opened.remove(open_, left=not open_.ended)
        if not open_.ended:
            self._metrics.cancelled.labels(open_.request.model).inc()
            try:
                await self._courier.cancel(open_)
            except AWAY as error:
                log.warning("request %s is not cancelled, the broker is away: %s", open_.request.id, error)

    def _limit(self, body: ChatBody | CompletionBody, prompt: int, reference: int, context: int) -> int:
        """max_tokens, checked against the context with the prompt and the reference."""
        wanted = body.limit
        room = context - prompt
        if wanted is None:
            most = self._settings.max_tokens if isinstance(body, ChatBody) else COMPLETION_TOKENS
            wanted = min(most, max(1, room))
        for name, tokens in (("max_tokens", wanted), ("reference", reference)):
            if tokens > room:
                raise InvalidRequest(
                    f"the prompt has {prompt} tokens and {name} {tokens}, together more than the context of {context}",
                    param=name if room > 0 else "prompt",
                    code="context_length_exceeded",
                )
        return wanted

    async def _open(self, request: Request) -> Open:
        slo = request.slo.name
        open_ = Open(request, self._keys.requests(request.model, slo))
        try:
            await self._courier.ensure_stream(request.model, slo, configured=slo in self._classes)
            self._opened.add(open_)
            await self._courier.send(open_)
        except BaseException as error:
            self._opened.remove(open_, left=True)
            if isinstance(error, BrokerError | OSError):
                raise Unavailable("the broker is away", retry_after_s=self._settings.retry_after_s) from error
            raise
        return open_

    async def _again(self, open_: Open) -> None:
        request = open_.request
        if request.attempt > self._settings.max_attempts:
            raise Unavailable(f"given up after {request.attempt} replicas were lost", code="replicas_lost")
        log.info("request %s goes on after %d tokens, attempt %d", request.id, len(request.prefix), request.attempt)
        self._metrics.again.labels(request.model).inc()
        try:
            await self._courier.send(open_)
        except BrokerError as error:
            raise Unavailable(str(error), code="broker_away") from error


class TimedOut(RequestError):
    """The overall limit of a request."""

    status = 504
    code = "timeout"


def failure(failed: Failed, retry_after_s: float) -> RequestError:
    """What a replica or the dispatch loop answered instead; a refusal that passes says when to come again."""
    passes = failed.status in (429, 503)
    error = RequestError(failed.message, code=failed.code, retry_after_s=retry_after_s if passes else None)
    error.status = failed.status
    if failed.status < 500:
        error.type = "rate_limit_error" if failed.status == 429 else "invalid_request_error"
    return error
