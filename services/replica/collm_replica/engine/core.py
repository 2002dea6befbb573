"""The engine around whatever computes: admission, iterations, answers, adapter versions."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from collm_common.errors import AdapterError, InternalError
from collm_common.messages import Delta, Done, Failed, Request
from collm_common.types import AdapterRef, Quality
from collm_replica.engine import admission
from collm_replica.engine.adapters import BASE_VERSION, AdapterTable
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.guide import Guide, Guides, unguided
from collm_replica.engine.kv import BlockPool
from collm_replica.engine.output import Output
from collm_replica.engine.protocol import (
    Backend,
    Broken,
    Outcome,
    Pending,
    Sampled,
    Scored,
    Staged,
    StepResult,
    Tensors,
    Told,
)
from collm_replica.engine.scheduler import Scheduler
from collm_replica.engine.sequence import Chunk, Timings
from collm_replica.engine.sequence import Sequence as Running

Reply = Delta | Done | Failed


@dataclass(frozen=True)
class Flying:
    """A run that the device may still be at."""

    chunks: list[Chunk]
    pending: Pending

    @property
    def depends(self) -> bool:
        """Whether what comes next depends on its tokens in more than their value."""
        return any(chunk.samples and chunk.sequence.output.depends for chunk in self.chunks)


_log = logging.getLogger(__name__)


class EngineCore:
    """Everything of an engine but the computing. Synchronous, for one thread; `clock` is monotonic, in seconds.

    schedule -> run -> settle: `step` asks the scheduler for chunks, the backend for their outcomes, and turns these
    into replies. With `run_ahead` it settles one run while the device is already at the next. A sequence that cannot be
    handled fails alone; an error of the backend's `run` reaches the caller.
    """

    def __init__(
        self,
        backend: Backend,
        decode: Callable[[Sequence[int]], str],
        eos: frozenset[int],
        vocabulary: int,
        blocks: int,
        config: EngineConfig,
        clock: Callable[[], float],
        guides: Guides = unguided,
    ) -> None:
        self.config = config
        self._backend = backend
        self._decode = decode
        self._eos = eos
        self._vocabulary = vocabulary
        self._clock = clock
        self._guides = guides
        self._adapters = AdapterTable(config.slots)
        weights = self._weights if config.prefix_cache else None
        self._pool = BlockPool(blocks, config.block_tokens)
        self._scheduler = Scheduler(self._pool, config.step_tokens, config.max_batch, weights)
        self._live: dict[str, Running] = {}
        self._answered: list[Running] = []
        self._flying: Flying | None = None
        self._order = 0
        self.preemptions = 0

    @property
    def limit(self) -> int:
        """b, the most sequences that run at once. Lowering it lets those that run end."""
        return self._scheduler.limit

    @limit.setter
    def limit(self, value: int) -> None:
        if value < 1:
            raise ValueError(f"limit is {value}, must be at least 1")
        self._scheduler.limit = min(value, self.config.max_batch)

    @property
    def has_work(self) -> bool:
        return bool(self._live) or self._flying is not None

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def free_blocks(self) -> int:
        return self._pool.free

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that requests hold, in 0..1."""
        return self._pool.usage

    @property
    def free_slots(self) -> int:
        return self._adapters.free

    @property
    def versions(self) -> dict[str, AdapterRef]:
        return dict(self._adapters.current)

    def guide(self, schema: str) -> Guide:
        """What `add` takes; for any thread, beside the steps. Raises InvalidRequest."""
        return self._guides(schema)

    def add(self, request: Request, guide: Guide | None = None) -> None:
        """Queue a request; a newer attempt of a live one replaces it, another is ignored.

        A schema is compiled here unless its `guide` is given.

        Raises InvalidRequest (too long, tokens outside the vocabulary, a schema that cannot be followed),
        UnknownModel (adapter or version not here) and Overloaded (`max_waiting` wait).
        """
        before = self._live.get(request.id)
        if before is not None and before.request.attempt >= request.attempt:
            return
        admission.check(request, self._vocabulary, self.config.context_tokens)
        admission.check_room(self.waiting, self.config.max_waiting)
        sampling = request.sampling
        if guide is None and sampling.json_schema:
            guide = self.guide(sampling.json_schema)
        output = Output(sampling, self._eos, self._decode, request.prefix, guide)
        sequence = Running(request, self._order, output, Timings(self._clock()))
        if request.version is not None:
            sequence.pin = self._adapters.pin(request.adapter, request.version)
        elif request.adapter:
            self._adapters.newest(request.adapter)
        if before is not None:
            self._drop(before)
        self._order += 1
        self._live[request.id] = sequence
        if output.finish is None:
            self._scheduler.add(sequence)
        else:
            self._answered.append(sequence)

    def cancel(self, request_id: str) -> bool:
        """Forget a request and free what it holds, at once; nothing is replied. False if it is not here."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self._drop(sequence)
        return sequence is not None

    def stage(self, ref: AdapterRef, tensors: Tensors, rank: int, alpha: float) -> Staged:
        """What `load_adapter` takes; for any thread, beside the steps. Raises AdapterError if it does not fit."""
        if ref.version == BASE_VERSION:
            raise AdapterError(f"adapter {ref} is the base model and cannot be loaded")
        if not self.config.slots:
            raise AdapterError(f"adapter {ref} cannot be loaded: the engine has no slots")
        return Staged(ref, self._backend.stage(tensors, rank, alpha))

    def load_adapter(self, staged: Staged, keep: Collection[str] = ()) -> bool:
        """Put a version into a slot, where `score` and `publish` find it; False if no slot is free now.

        Without a free slot the version that was used longest ago makes room, unless it runs, its name is in `keep`
        or a request waits for it. Versions never change, so one that is here already is kept.
        """
        ref = staged.ref
        if self._adapters.holds(ref):
            return True
        slot = self._adapters.reserve()
        if slot is None:
            waiting = {sequence.request.adapter for sequence in self._live.values() if sequence.pin is None}
            self._clear(self._adapters.evict(waiting.union(keep)))
            slot = self._adapters.reserve()
        if slot is None:
            return False
        self._backend.load(slot, staged.factors)
        self._adapters.loaded(ref, slot)
        return True

    def publish(self, ref: AdapterRef) -> None:
        """New admissions use `ref`; running requests keep theirs. Version 0 is the base model. Raises AdapterError."""
        self._clear(self._adapters.publish(ref))

    def retire(self, name: str) -> None:
        """Forget an adapter; requests that are here keep the version that is current now."""
        for sequence in self._live.values():
            if sequence.pin is None and sequence.request.adapter == name:
                sequence.pin = self._adapters.pin(name, None)
        self._clear(self._adapters.retire(name))

    def discard(self, ref: AdapterRef) -> None:
        """Drop a loaded version that was not published; one that is current or used stays."""
        self._clear(self._adapters.discard(ref))

    def score(self, prompt: Sequence[int], reference: Sequence[int], adapter: AdapterRef | None = None) -> Quality:
        """Token-level cross-entropy (nats) of `reference` after `prompt` under a loaded version or the base model.

        Raises InvalidRequest, UnknownModel, or InternalError if the loss is not finite.
        """
        admission.check_score(prompt, reference, self._vocabulary, self.config.context_tokens)
        nll = self._backend.score(prompt, reference, self._adapters.find(adapter))
        if not math.isfinite(nll):
            raise InternalError(f"the loss under {adapter or 'the base model'} is not finite")
        return Quality(nll / len(reference), len(reference))

    def step(self) -> StepResult:
        """Run one iteration; empty if there is nothing to do."""
        start = self._clock()
        replies = [reply for sequence in self._answered[:] for reply in self._answer_known(sequence)]
        landed: list[Flying] = []
        if self._flying is not None and self._flying.depends:
            landed.append(self._flying)
            replies += self._land(self._flying)
            self._flying = None
        plan = self._scheduler.schedule()
        self.preemptions += len(plan.preempted)
        for sequence in plan.admitted:
            self._admit(sequence)
        launched = self._launch(sorted(plan.chunks, key=lambda chunk: not chunk.decode))
        if not self.config.run_ahead:
            self._flying, launched = launched, None
        if self._flying is not None:
            landed.append(self._flying)
            replies += self._land(self._flying)
        self._flying = launched
        return _result(landed, replies, self._clock() - start)

    def _weights(self, sequence: Running) -> int:
        """What computes its keys and values, as `Pin.weights`."""
        return (sequence.pin or self._adapters.peek(sequence.request.adapter)).weights

    def _launch(self, chunks: list[Chunk]) -> Flying | None:
        """Begin to compute; the tokens to come are in their sequences already, under way."""
        if not chunks:
            return None
        if self._pool.soiled:
            self._backend.scrub(self._pool.soiled)
            self._pool.soiled.clear()
        pending = self._backend.run(chunks)
        sampled = 0
        for chunk in chunks:
            chunk.sequence.computed = chunk.end
            if chunk.samples:
                sampled += 1
                chunk.sequence.tokens.append(-sampled)
        return Flying(chunks, pending)

    def _land(self, flying: Flying) -> list[Reply]:
        """Wait for the outcomes. Those of a sequence that has ended since, or begun again, are dropped."""
        replies: list[Reply] = []
        for chunk, outcome in zip(flying.chunks, flying.pending.outcomes(), strict=True):
            sequence = chunk.sequence
            ended = self._live.get(sequence.request.id) is not sequence or (chunk.samples and sequence.scoring)
            same = chunk.life == sequence.life
            if not ended and same and not isinstance(outcome, Broken):
                self._scheduler.keep(chunk)
            if not ended and (chunk.samples or same):
                replies += self._settle(chunk, outcome)
        return replies

    def _admit(self, sequence: Running) -> None:
        if sequence.times.started_s is None:
            sequence.times.started_s = self._clock()
            sequence.cached = min(sequence.computed, len(sequence.request.prompt))
        if sequence.pin is None:
            sequence.pin = self._adapters.pin(sequence.request.adapter, None)

    def _answer_known(self, sequence: Running) -> list[Reply]:
        """The prefix was already the whole answer."""
        self._answered.remove(sequence)
        self._scheduler.add(sequence)
        if sequence.pin is None:
            sequence.pin = self._adapters.pin(sequence.request.adapter, None)
        return self._reply(sequence, len(sequence.output.tokens), (), "")

    def _settle(self, chunk: Chunk, outcome: Outcome) -> list[Reply]:
        sequence = chunk.sequence
        try:
            match outcome:
                case Sampled():
                    sequence.tokens[chunk.end] = outcome.token
                    if chunk.told:
                        sequence.tell(chunk.start, outcome.told)
                    return self._accept(sequence, outcome)
                case Told(told):
                    sequence.tell(chunk.start, told)
                    return []
                case Scored(nll):
                    sequence.add_score(nll, len(chunk.targets))
                    whole = sequence.scored == len(sequence.request.reference)
                    return [self._complete(sequence)] if whole else []
                case Broken(reason):
                    self._pool.distrust(sequence.blocks)
                    return [self._give_up(sequence, reason)]
                case None:
                    return []
        except Exception as error:
            _log.exception("request %s failed", sequence.request.id)
            return [self._give_up(sequence, str(error))]

    def _accept(self, sequence: Running, sampled: Sampled) -> list[Reply]:
        if sequence.times.first_token_s is None:
            sequence.times.first_token_s = self._clock()
        text = sequence.output.push(sampled.token)
        return self._reply(sequence, len(sequence.output.tokens) - 1, (sampled,), text)

    def _reply(self, sequence: Running, offset: int, sampled: tuple[Sampled, ...], text: str) -> list[Reply]:
        request, output = sequence.request, sequence.output
        delta = Delta(
            id=request.id,
            attempt=request.attempt,
            offset=offset,
            tokens=tuple(one.token for one in sampled),
            text=text,
            adapter=sequence.pin.ref if sequence.pin else None,
            finish=output.finish,
            logprobs=tuple(one.logprob for one in sampled if one.logprob is not None),
            prompt_logprobs=tuple(sequence.told) if offset == 0 else (),
        )
        if output.finish is None:
            return [delta]
        sequence.times.finished_s = self._clock()
        if not request.reference:
            return [delta, self._complete(sequence)]
        self._scheduler.begin_scoring(sequence)
        return [delta]

    def _complete(self, sequence: Running) -> Done:
        self._drop(sequence)
        quality = Quality(sequence.nll / sequence.scored, sequence.scored) if sequence.scored else None
        return sequence.times.done(sequence.request, len(sequence.output.tokens), sequence.cached, quality)

    def _give_up(self, sequence: Running, reason: str) -> Reply:
        """An answer that is out already is not taken back for a score that failed."""
        if sequence.scoring:
            sequence.scored = 0
            return self._complete(sequence)
        self._drop(sequence)
        error = InternalError(reason)
        return Failed(sequence.request.id, sequence.request.attempt, error.status, error.code, error.message)

    def _drop(self, sequence: Running) -> None:
        del self._live[sequence.request.id]
        if sequence in self._answered:
            self._answered.remove(sequence)
        else:
            self._scheduler.remove(sequence)
        if sequence.pin is not None:
            self._clear(self._adapters.unpin(sequence.pin))

    def _clear(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._backend.clear(slot)


def _result(landed: list[Flying], replies: list[Reply], duration_s: float) -> StepResult:
    """What was waited for is what took the time."""
    chunks = [chunk for flying in landed for chunk in flying.chunks]
    decodes = sum(chunk.decode for chunk in chunks)
    return StepResult(replies, sum(chunk.count for chunk in chunks) - decodes, decodes, len(chunks), duration_s)
