"""Requests from acceptance to their last token, whatever carries it to the client."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec

from collm_common.broker import AWAY
from collm_common.clock import Clock
from collm_common.errors import BrokerError, BrokerFault, InternalError, InvalidRequest, RequestError, Unavailable
from collm_common.keys import Keys
from collm_common.messages import Delta, Done, Failed, Request
from collm_common.tracing import UNTRACED, Span
from collm_common.types import AdapterRef, SamplingParams, Slo
from collm_dispatcher.ingress import objectives
from collm_dispatcher.ingress.body import MAX_CHOICES, SEEDS, ChatBody, CompletionBody
from collm_dispatcher.ingress.courier import Courier
from collm_dispatcher.ingress.directory import Directory, Target
from collm_dispatcher.ingress.gate import Caller
from collm_dispatcher.ingress.inbox import Again
from collm_dispatcher.ingress.merge import merged
from collm_dispatcher.ingress.metrics import Metrics
from collm_dispatcher.ingress.open_requests import Open, OpenRequests
from collm_dispatcher.ingress.render import Shape
from collm_dispatcher.ingress.response import Answer, Response
from collm_dispatcher.ingress.tokenizing import Prompt, Tokenizing
from collm_dispatcher.settings import DEFAULT, DispatcherSettings

log = logging.getLogger(__name__)
COMPLETION_TOKENS = 16


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
                await self._courier.announce(model, slo)

    async def accept(
        self, body: ChatBody | CompletionBody, headers: Mapping[str, str], caller: Caller, span: Span = UNTRACED
    ) -> Response:
        """Check, count, append; `span` ends with that. Raises RequestError; then nothing is open."""
        try:
            response = await self._accept(body, headers, caller, span.parent)
        except BaseException as error:
            span.end(error=error.code if isinstance(error, RequestError) else type(error).__name__)
            raise
        span.end()
        return response

    async def _accept(
        self, body: ChatBody | CompletionBody, headers: Mapping[str, str], caller: Caller, traceparent: str
    ) -> Response:
        arrived_s, arrival_s = self._clock.monotonic(), self._clock.now()
        target = self._directory.find(body.model, caller.hidden)
        slo = objectives.choose(self._classes, headers, body.slo)
        caller.check(slo)
        text = self._tokenizers[target.model]
        prompts = await text.prompts(body)
        requests = await self._requests(body, target, slo, caller.tenant, prompts, arrival_s)
        if traceparent:
            requests = [msgspec.structs.replace(request, traceparent=traceparent) for request in requests]
        opened = await self._open(requests)
        shape = Shape(
            chat=isinstance(body, ChatBody),
            id_=opened[0].request.id,
            created=int(time.time()),
            model=body.model,
            with_logprobs=body.logprob_count is not None,
            text=text,
            echoes=[prompt if body.echoes else None for prompt in prompts for _ in range(body.n or 1)],
        )
        answers = [Answer(open_, self._metrics, arrived_s) for open_ in opened]
        self._metrics.choices.labels(target.model).observe(body.n or 1)
        return Response(shape, answers, sum(len(prompt.tokens) for prompt in prompts), body.limit == 0)

    async def try_out(self, model: str, ref: AdapterRef) -> None:
        """One token under an adapter version, published or not. Raises RequestError as the replica said that tried."""
        arrival_s = self._clock.now()
        request = Request(
            id=uuid.uuid4().hex,
            ingress=self._courier.ingress,
            model=model,
            adapter=ref.name,
            version=ref.version,
            prompt=(1,),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
            slo=self._classes[DEFAULT],
            arrival_s=arrival_s,
            deadline_s=arrival_s + self._settings.request_timeout_s,
        )
        (open_,) = await self._open([request])
        # No client offered it, so it counts neither for goodput nor for attainment.
        answer = Answer(open_, Metrics(self._settings.class_names), self._clock.monotonic())
        try:
            async for _ in self._follow(answer):
                pass
        finally:
            await self._end([answer])

    async def follow(self, response: Response) -> AsyncGenerator[tuple[int, Delta], None]:
        """Every delta once, with its choice, each choice's in order. Raises RequestError."""
        async for index, delta in merged([self._follow(answer) for answer in response.answers]):
            yield index, _unsaid(delta) if response.echo_only else delta

    async def close(self, response: Response) -> None:
        """Afterwards nothing of it is left here or at a replica, whether it ended or not."""
        await self._end(response.answers)

    async def _end(self, answers: Sequence[Answer]) -> None:
        for open_ in [answer.open for answer in answers if self._let_go(answer)]:
            self._metrics.cancelled.labels(open_.request.model).inc()
            try:
                await self._courier.cancel(open_)
            except AWAY as error:
                log.warning("request %s is not cancelled, the broker is away: %s", open_.request.id, error)

    async def _requests(
        self,
        body: ChatBody | CompletionBody,
        target: Target,
        slo: Slo,
        tenant: str,
        prompts: Sequence[Prompt],
        arrival_s: float,
    ) -> list[Request]:
        """`n` of each prompt. The first answers as if it were alone; the others have seeds of their own."""
        count = body.n or 1
        if count * len(prompts) > MAX_CHOICES:
            raise InvalidRequest(
                f"n: {count} choices of {len(prompts)} prompts are more than the limit of {MAX_CHOICES}", param="n"
            )
        context = self._directory.context_tokens(target.model, self._settings.retry_after_s)
        reference = await self._tokenizers[target.model].reference(body.reference) if body.reference else ()
        if reference and count * len(prompts) > 1:
            raise InvalidRequest("reference: only a single choice is compared with one", param="reference")
        requests = []
        for prompt in prompts:
            limit = self._limit(body, len(prompt.tokens), len(reference), context)
            sampling = body.sampling(limit, body.logprob_count)
            requests += [
                Request(
                    id=uuid.uuid4().hex,
                    ingress=self._courier.ingress,
                    model=target.model,
                    adapter=target.adapter,
                    version=target.version,
                    prompt=prompt.tokens,
                    reference=reference,
                    sampling=msgspec.structs.replace(sampling, seed=(sampling.seed + number) % SEEDS),
                    slo=slo,
                    tenant=tenant,
                    arrival_s=arrival_s,
                    deadline_s=slo.deadline(arrival_s, limit),
                )
                for number in range(count)
            ]
        return requests

    async def _follow(self, answer: Answer) -> AsyncGenerator[Delta, None]:
        """Every delta once, in order; `answer.done` is set at the end. Raises RequestError."""
        open_, loop = answer.open, asyncio.get_running_loop()
        end_s = loop.time() + self._settings.request_timeout_s
        while answer.done is None:
            try:
                told = await self._told(open_, end_s)
            except RequestError as error:
                if open_.finish is None:
                    raise
                log.warning("request %s is answered and not scored: %s", open_.request.id, error)
                told = open_.unscored()
            if isinstance(told, Done):
                answer.done = told
            else:
                answer.saw(told, self._clock.monotonic())
                yield told

    async def _told(self, open_: Open, end_s: float) -> Delta | Done:
        """What there is for the client next; `end_s` is of the loop's clock. Raises RequestError."""
        while True:
            try:
                async with asyncio.timeout_at(end_s):
                    told = await open_.told.get()
            except TimeoutError as error:
                raise TimedOut(f"no end after {self._settings.request_timeout_s:g} s") from error
            match told:
                case Again():
                    await self._again(open_)
                case Failed():
                    raise failure(told, self._settings.retry_after_s)
                case _:
                    return told

    def _let_go(self, answer: Answer) -> bool:
        """Forget it here; whether a replica may still have it."""
        answer.close()
        left = not answer.open.ended
        self._opened.remove(answer.open, left=left)
        return left

    def _limit(self, body: ChatBody | CompletionBody, prompt: int, reference: int, context: int) -> int:
        """max_tokens, checked against the context with the prompt and the reference."""
        wanted = body.limit
        room = context - prompt
        if wanted is None:
            most = self._settings.max_tokens if isinstance(body, ChatBody) else COMPLETION_TOKENS
            wanted = min(most, max(1, room))
        wanted = max(1, wanted)
        for name, tokens in (("max_tokens", wanted), ("reference", reference)):
            if tokens > room:
                raise InvalidRequest(
                    f"the prompt has {prompt} tokens and {name} {tokens}, together more than the context of {context}",
                    param=name if room > 0 else "prompt",
                    code="context_length_exceeded",
                )
        return wanted

    async def _open(self, requests: Sequence[Request]) -> list[Open]:
        """All of one model and objective, or none."""
        model, slo = requests[0].model, requests[0].slo.name
        opened = [Open(request, self._keys.requests(model, slo)) for request in requests]
        try:
            for open_ in opened:
                self._opened.add(open_)
            await self._courier.send(opened, configured=slo in self._classes)
        except BaseException as error:
            for open_ in opened:
                self._opened.remove(open_, left=True)
            if isinstance(error, BrokerError | OSError):
                raise self._broken(error) from error
            raise
        return opened

    async def _again(self, open_: Open) -> None:
        request = open_.request
        if request.attempt > self._settings.max_attempts:
            raise Unavailable(f"given up after {request.attempt} replicas were lost", code="replicas_lost")
        log.info("request %s goes on after %d tokens, attempt %d", request.id, len(request.prefix), request.attempt)
        self._metrics.again.labels(request.model).inc()
        try:
            await self._courier.send_again(open_)
        except BrokerError as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> RequestError:
        log.warning("%s", error)
        if isinstance(error, BrokerFault):
            return InternalError("the broker refuses", code="broker_fault")
        return Unavailable("the broker is away", code="broker_away", retry_after_s=self._settings.retry_after_s)


def _unsaid(delta: Delta) -> Delta:
    """The same without what it says of the answer."""
    return msgspec.structs.replace(delta, text="", logprobs=(), finish=delta.finish and "length")


class TimedOut(RequestError):
    """The overall limit of a request."""

    status = 504
    code = "timeout"


def failure(failed: Failed, retry_after_s: float) -> RequestError:
    """What a replica or the dispatch loop answered instead; a refusal that passes says when to come again."""
    passes = failed.status in (429, 503)
    error = RequestError(
        failed.message, param=failed.param, code=failed.code, retry_after_s=retry_after_s if passes else None
    )
    error.status = failed.status
    if failed.status < 500:
        error.type = "rate_limit_error" if failed.status == 429 else "invalid_request_error"
    return error
