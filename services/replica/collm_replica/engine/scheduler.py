"""What the next iteration runs. Pure: tokens, blocks and deadlines in, chunks out."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from collm_replica.engine.kv import BlockPool
from collm_replica.engine.sequence import Chunk, Sequence


@dataclass
class Plan:
    """`chunks` is read by the backend; `admitted` (for the first time or again) and `preempted` by the engine."""

    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)


class Scheduler:
    """Continuous batching: at most `limit` sequences run, `step_tokens` tokens an iteration.

    Every running sequence that decodes gets its token; what is left of the budget prefills, oldest first, then
    admits by earliest deadline. Without a free block the youngest sequence is preempted and computed again later, so
    the oldest always goes on. A lower `limit` stops admission; nobody is thrown out.

    `weights` numbers what computes a sequence's keys and values. Those under the same number share blocks that hold the
    same first tokens; without it nothing is shared.
    """

    def __init__(
        self, pool: BlockPool, step_tokens: int, limit: int, weights: Callable[[Sequence], int] | None = None
    ) -> None:
        self.pool = pool
        self.step_tokens = step_tokens
        self.limit = limit
        self._weights = weights
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits into the whole pool."""
        insort(self.waiting, sequence, key=attrgetter("urgency"))

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and take its blocks back."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self.pool.shrink(sequence.blocks, 0)

    def schedule(self) -> Plan:
        """Give out blocks for the next iteration; its caller runs it and then advances `computed`."""
        plan = Plan()
        budget = self.step_tokens - sum(sequence.decoding for sequence in self.running)
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if sequence.ending:
                index += 1
                continue
            count = 1 if sequence.decoding else min(sequence.remaining, budget)
            if count and self._grow(sequence, count, plan):
                budget -= 0 if sequence.decoding else count
                self._run(sequence, count, plan)
            index += 1
        if not plan.preempted:
            self._admit(budget, plan)
        return plan

    def keep(self, chunk: Chunk) -> None:
        """The keys and values of a chunk are written: others may go on behind them, but for those of a reference."""
        if self._weights is None:
            return
        sequence, size = chunk.sequence, self.pool.block_tokens
        end = min(chunk.end, len(sequence.request.prompt)) if sequence.scoring else chunk.end
        if end // size <= chunk.start // size:
            return
        keys = sequence.chain.keys(self._weights(sequence), sequence.tokens, size, end)
        for number in range(chunk.start // size, len(keys)):
            self.pool.keep(sequence.blocks, number, keys[number])

    def begin_scoring(self, sequence: Sequence) -> None:
        """It goes on with its reference, in no block that somebody could find."""
        sequence.begin_scoring(self.pool.block_tokens)
        self.pool.shrink(sequence.blocks, sequence.computed)

    def _found(self, sequence: Sequence) -> list[int]:
        if self._weights is None:
            return []
        size, weights = self.pool.block_tokens, self._weights(sequence)
        return self.pool.find(sequence.chain.keys(weights, sequence.tokens, size, sequence.reusable))

    def _admit(self, budget: int, plan: Plan) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.limit:
            sequence = self.waiting[0]
            found = self._found(sequence)
            if not self.pool.fits(found, len(sequence.tokens)):
                return
            del self.waiting[0]
            self.running.append(sequence)
            plan.admitted.append(sequence)
            self.pool.share(sequence.blocks, found)
            sequence.computed = len(found) * self.pool.block_tokens
            count = min(sequence.remaining, budget)
            self.pool.grow(sequence.blocks, sequence.computed + count)
            budget -= count
            self._run(sequence, count, plan)

    def _grow(self, sequence: Sequence, count: int, plan: Plan) -> bool:
        """Make room for `count` more tokens at the cost of younger sequences; False if it is itself the youngest."""
        while not self.pool.grow(sequence.blocks, sequence.computed + count):
            victim = self.running.pop()
            self.pool.shrink(victim.blocks, 0)
            victim.restart()
            self.add(victim)
            plan.preempted.append(victim)
            if victim is sequence:
                return False
        return True

    @staticmethod
    def _run(sequence: Sequence, count: int, plan: Plan) -> None:
        plan.chunks.append(Chunk.of(sequence, count))
