"""What the inference process needs of an engine, and what an engine needs of whatever computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from collm_common.messages import Delta, Done, Failed, Request, TokenLogprob
from collm_common.types import AdapterRef, Quality
from collm_replica.engine.guide import Guide
from collm_replica.engine.sequence import Chunk, Pin

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]
"""An adapter's tensors in the names PEFT saves them under."""


@dataclass(frozen=True)
class Staged:
    """A version that is checked and ready for a slot; `factors` is the backend's own."""

    ref: AdapterRef
    factors: Any


@dataclass(frozen=True)
class StepResult:
    """One iteration: replies in the order they were made, tokens run, sequences that ran, seconds."""

    replies: list[Delta | Done | Failed]
    prefill_tokens: int
    decode_tokens: int
    running: int
    duration_s: float


class InferenceEngine(Protocol):
    """Continuous batching over one model and several adapter versions; one thread, no I/O."""

    @property
    def limit(self) -> int:
        """b, the most sequences that run at once."""

    @limit.setter
    def limit(self, value: int) -> None: ...

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""

    @property
    def running(self) -> int:
        """Requests in the running batch."""

    @property
    def preemptions(self) -> int:
        """Sequences so far whose KV blocks others needed and that were computed again."""

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that requests hold, in 0..1."""

    @property
    def versions(self) -> dict[str, AdapterRef]:
        """The current version of each adapter name."""

    def guide(self, schema: str) -> Guide:
        """What holds an answer to a JSON schema; for any thread, beside `step`. Raises InvalidRequest."""

    def add(self, request: Request, guide: Guide | None = None) -> None:
        """Queue a request, with the guide of its schema if it has one. Raises RequestError."""

    def cancel(self, request_id: str) -> bool:
        """Forget a request at once and without a reply; False if it is not here."""

    def stage(self, ref: AdapterRef, tensors: Tensors, rank: int, alpha: float) -> Staged:
        """Check a version and make it ready; for any thread, beside `step`. Raises AdapterError."""

    def load_adapter(self, staged: Staged, keep: Collection[str] = ()) -> bool:
        """Put a version into a slot, at the cost of an idle one that `keep` does not name; False if none is free."""

    def publish(self, ref: AdapterRef) -> None:
        """Make a loaded version current for its name. Raises AdapterError."""

    def retire(self, name: str) -> None:
        """Forget an adapter; requests that are here keep the version that is current now."""

    def discard(self, ref: AdapterRef) -> None:
        """Drop a loaded version that was not published."""

    def score(self, prompt: Sequence[int], reference: Sequence[int], adapter: AdapterRef | None) -> Quality:
        """Cross-entropy of `reference` after `prompt`, under a loaded version. Raises RequestError."""

    def step(self) -> StepResult:
        """Run one iteration."""


@dataclass(frozen=True)
class Sampled:
    """The next token of a sequence; `told` as in Told."""

    token: int
    logprob: TokenLogprob | None = None
    told: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Told:
    """Log-probabilities of the prompt's tokens that a chunk predicted."""

    told: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Scored:
    """Summed loss (nats) of the chunk's `targets`."""

    nll: float


@dataclass(frozen=True)
class Broken:
    """The sequence cannot go on."""

    reason: str


Outcome = Sampled | Told | Scored | Broken | None
"""What a chunk gave; None is a piece of a prompt."""


class Pending(Protocol):
    """What a run gave; it may still be under way."""

    def outcomes(self) -> list[Outcome]:
        """One outcome a chunk, in their order; waits for them."""


@dataclass(frozen=True)
class Landed:
    """Outcomes that are here."""

    results: list[Outcome]

    def outcomes(self) -> list[Outcome]:
        """Those."""
        return self.results


class Backend(Protocol):
    """Computes chunks. A sequence's `blocks` and `pin` say where its keys, values and adapter are."""

    def run(self, chunks: Sequence[Chunk]) -> Pending:
        """Begin to compute. A token -1 - i of a chunk is the i-th that the run before has chosen."""

    def score(self, prompt: Sequence[int], reference: Sequence[int], pin: Pin) -> float:
        """Summed loss (nats) of `reference` after `prompt`."""

    def stage(self, tensors: Tensors, rank: int, alpha: float) -> Any:
        """Check an adapter and make of it what `load` takes; for any thread. Raises AdapterError."""

    def load(self, slot: int, factors: Any) -> None:
        """Write it."""

    def clear(self, slot: int) -> None:
        """Zero a slot."""

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero KV blocks that may hold values that are not finite."""
