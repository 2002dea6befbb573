"""One request inside the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from collm_common.messages import Done, Request, TokenLogprob
from collm_common.types import AdapterRef, Quality
from collm_replica.engine.chain import Chain
from collm_replica.engine.output import Output


@dataclass(frozen=True)
class Pin:
    """The adapter version a sequence runs with to its end; slot -1 is the base model.

    `weights` tells one load of a version from every other; 0 is the base model.
    """

    ref: AdapterRef | None = None
    slot: int = -1
    weights: int = 0


@dataclass
class Timings:
    """Seconds of the engine's clock, in this order; None: not yet."""

    added_s: float
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def done(self, request: Request, output_tokens: int, cached_tokens: int, quality: Quality | None) -> Done:
        """The final reply; a stage that was never entered took no time."""
        finished_s = self.added_s if self.finished_s is None else self.finished_s
        started_s = finished_s if self.started_s is None else min(self.started_s, finished_s)
        first_s = finished_s if self.first_token_s is None else self.first_token_s
        return Done(
            id=request.id,
            attempt=request.attempt,
            output_tokens=output_tokens,
            queue_s=started_s - self.added_s,
            prefill_s=first_s - started_s,
            decode_s=finished_s - first_s,
            quality=quality,
            cached_tokens=cached_tokens,
        )


@dataclass(eq=False)
class Sequence:
    """`tokens` are those whose keys and values the model needs; the first `computed` of them lie in `blocks`.

    A token that is chosen but still under way from the device is -1 - i, the i-th that its run chose.

    While it answers, tokens are prompt, prefix and what was generated. While it is scored, they are the prompt and
    the reference without its last token, and `nll` sums the loss of the `scored` reference tokens seen so far.
    `cached` tokens of the prompt were found in KV blocks when it began; `told` are the log-probabilities of its tokens
    from the second on, as far as they are asked for and known.
    """

    request: Request
    order: int
    output: Output
    times: Timings
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    pin: Pin | None = None
    scoring: bool = False
    nll: float = 0.0
    scored: int = 0
    life: int = 0
    cached: int = 0
    chain: Chain = field(default_factory=Chain)
    told: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.request.prefix]

    @property
    def urgency(self) -> tuple[float, int]:
        """Earliest deadline first, then first come."""
        return (self.request.deadline_s, self.order)

    @property
    def remaining(self) -> int:
        """Tokens still to be run through the model."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """One token is left to run, and it is of the answer."""
        return not self.scoring and self.remaining == 1 and self.computed >= len(self.request.prompt)

    @property
    def tells(self) -> bool:
        """Whether log-probabilities of the prompt are asked for, and not out with the answer's first token yet."""
        return self.request.sampling.prompt_logprobs and not self.scoring and not self.output.tokens

    @property
    def reusable(self) -> int:
        """The first tokens whose logits nobody asks for: their keys and values may be somebody else's."""
        return 0 if self.tells else len(self.request.prompt if self.scoring else self.tokens) - 1

    def begin_scoring(self, block_tokens: int) -> None:
        """Go on with the reference behind the prompt, from the start of the block that has the prompt's last token.

        That block may be full of the answer, and somebody else's as well.
        """
        prompt = self.request.prompt
        self.tokens = [*prompt, *self.request.reference[:-1]]
        self.scoring = True
        self.computed = min(self.computed, self.reusable // block_tokens * block_tokens)

    @property
    def ending(self) -> bool:
        """Its last token is under way: whatever it is, none follows."""
        answered = len(self.tokens) - len(self.request.prompt)
        return not self.scoring and self.tokens[-1] < 0 and answered >= self.request.sampling.max_tokens

    def restart(self) -> None:
        """Nothing is computed any more; scores that are under way belong to the life before."""
        self.computed, self.nll, self.scored = 0, 0.0, 0
        self.life += 1

    def tell(self, start: int, told: Iterable[TokenLogprob]) -> None:
        """Log-probabilities of the prompt's tokens behind the `start`-th; those that were known from there on go."""
        self.told[start:] = told

    def add_score(self, nll: float, tokens: int) -> None:
        """Loss (nats, summed) of the next `tokens` reference tokens."""
        self.nll += nll
        self.scored += tokens


@dataclass(frozen=True)
class Chunk:
    """Run `count` tokens of `sequence`, from its `start`-th on.

    `samples`: the chunk reaches the end of an answer so far, and its last logits choose the next token. `targets` are
    the reference tokens that its last len(targets) positions predict, `told` the prompt's tokens that its first
    len(told) positions predict and whose log-probabilities are asked for.
    """

    sequence: Sequence
    start: int
    count: int
    decode: bool
    samples: bool
    targets: tuple[int, ...]
    told: tuple[int, ...]
    life: int

    @classmethod
    def of(cls, sequence: Sequence, count: int) -> Chunk:
        """The sequence's next `count` tokens."""
        start, end = sequence.computed, sequence.computed + count
        samples = not sequence.scoring and end == len(sequence.tokens)
        targets: tuple[int, ...] = ()
        if sequence.scoring:
            first = len(sequence.request.prompt) - 1
            targets = sequence.request.reference[max(0, start - first) : max(0, end - first)]
        told = sequence.request.prompt[start + 1 : end + 1] if sequence.tells else ()
        return cls(sequence, start, count, sequence.decoding, samples, targets, told, sequence.life)

    @property
    def end(self) -> int:
        return self.start + self.count
