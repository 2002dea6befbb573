"""An engine without a model, for everything around it: same scheduling, same replies, no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from collm_common.types import AdapterRef
from collm_replica.engine.config import EngineConfig
from collm_replica.engine.core import EngineCore
from collm_replica.engine.protocol import Landed, Outcome, Sampled, Scored, Tensors
from collm_replica.engine.sequence import Chunk, Pin

VOCABULARY = 2**31


def echo(prompt: Sequence[int], position: int) -> int:
    """The answer's token at `position`: the prompt over and over."""
    return prompt[position % len(prompt)]


def spell(tokens: Sequence[int]) -> str:
    """Each token as a number after a space."""
    return "".join(f" {token}" for token in tokens)


def learnt(ref: AdapterRef | None) -> float:
    """Cross-entropy of any reference: 2 / (1 + n) nats under version n, so later versions are better."""
    return 2.0 / (1 + float(ref.version if ref else 0))


class FakeBackend:
    """Waits `iteration_s(sequences, tokens)` seconds an iteration by `sleep` and echoes prompts."""

    def __init__(
        self,
        iteration_s: Callable[[int, int], float],
        sleep: Callable[[float], None],
        cross_entropy: Callable[[AdapterRef | None], float],
    ) -> None:
        self._iteration_s = iteration_s
        self._sleep = sleep
        self._cross_entropy = cross_entropy

    def run(self, chunks: Sequence[Chunk]) -> Landed:
        self._sleep(self._iteration_s(len(chunks), sum(chunk.count for chunk in chunks)))
        return Landed([self._outcome(chunk) for chunk in chunks])

    def score(self, prompt: Sequence[int], reference: Sequence[int], pin: Pin) -> float:
        return len(reference) * self._cross_entropy(pin.ref)

    def stage(self, tensors: Tensors, rank: int, alpha: float) -> None:
        """Everything fits."""

    def load(self, slot: int, factors: None) -> None:
        """There is nothing to write."""

    def clear(self, slot: int) -> None:
        """There is nothing to zero."""

    def scrub(self, blocks: Sequence[int]) -> None:
        """There is nothing to zero."""

    def _outcome(self, chunk: Chunk) -> Outcome:
        sequence = chunk.sequence
        if chunk.samples:
            return Sampled(echo(sequence.request.prompt, len(sequence.output.tokens)))
        if chunk.targets:
            return Scored(len(chunk.targets) * self._cross_entropy(sequence.pin.ref if sequence.pin else None))
        return None


class FakeEngine(EngineCore):
    """`EngineCore` over `FakeBackend`; it has KV blocks for a full batch of full contexts."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        iteration_s: Callable[[int, int], float] = lambda sequences, tokens: 0.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
        decode: Callable[[Sequence[int]], str] = spell,
        cross_entropy: Callable[[AdapterRef | None], float] = learnt,
    ) -> None:
        config = config or EngineConfig()
        backend = FakeBackend(iteration_s, sleep, cross_entropy)
        super().__init__(backend, decode, frozenset(), VOCABULARY, config.most_blocks, config, clock)
