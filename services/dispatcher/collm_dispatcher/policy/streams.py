"""What is learned of each original stream as it goes: prompts, output lengths, arrivals, its objective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import exp2, log2

from collm_common.types import Slo
from collm_dispatcher.policy.balance import Demand
from collm_dispatcher.policy.forecast import Forecast
from collm_dispatcher.policy.lengths import Lengths
from collm_dispatcher.policy.pacing import Shape

MEMORY_S = 30.0
PROMPT_WEIGHT = 0.05
QUANTILES = 10
ANSWERS = 16
"""What is known of the lengths is brought up to date after so many new answers: every mode follows from it."""


class Stream:
    """One stream. `seen_s` is when its last request came.

    `prompt_tokens`, and `cached_tokens` of them that the replicas did not have to compute, are moving averages.
    """

    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.seen_s = 0.0
        self.prompt_tokens = 0.0
        self.cached_tokens = 0.0
        self.lengths = Lengths()
        self.forecast = Forecast()
        self.arrivals = 0
        self._typical = Shape()
        self._answers = 0
        self._shapes: dict[tuple[float, float], Shape] = {}

    def arrived(self, slo: Slo, prompt_tokens: int, now_s: float) -> None:
        """A request came in."""
        self.slo, self.seen_s = slo, now_s
        self.arrivals += 1
        weight = PROMPT_WEIGHT if self.prompt_tokens else 1.0
        self.prompt_tokens += weight * (prompt_tokens - self.prompt_tokens)

    def answered(self, tokens: int, cached_tokens: int) -> None:
        """An answer of one of its requests ended."""
        self.lengths.observe(tokens)
        self._answers += 1
        self.cached_tokens += PROMPT_WEIGHT * (cached_tokens - self.cached_tokens)

    @property
    def computed(self) -> float:
        """The part of a prompt that has to be computed, 0..1."""
        return 1.0 - min(1.0, self.cached_tokens / self.prompt_tokens) if self.prompt_tokens else 1.0

    def observe(self, elapsed_s: float) -> None:
        """So much time has passed: what was learned since then counts from now on."""
        self.forecast.observe(self.arrivals, elapsed_s)
        self.arrivals = 0
        self._shapes.clear()
        if self._answers >= ANSWERS and self.lengths.known:
            self._answers = 0
            self._typical = Shape(0.0, _coarse(self.lengths.mean), self.lengths.quantiles(QUANTILES))

    def shape(self, prefill_s_per_token: float, output_tokens: float) -> Shape:
        """The shape of its requests; `output_tokens` is what to expect until enough answers were seen.

        It stays as it is until the next `observe`.
        """
        known = self._shapes.get((prefill_s_per_token, output_tokens))
        if known is not None:
            return known
        prefill_s = prefill_s_per_token * _coarse(self.computed * self.prompt_tokens)
        if self._typical.lengths:
            shape = Shape(prefill_s, self._typical.output_tokens, self._typical.lengths)
        else:
            shape = Shape(prefill_s, output_tokens)
        if self.prompt_tokens:
            self._shapes[prefill_s_per_token, output_tokens] = shape
        return shape


class Streams:
    """All streams of one model."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}

    def arrived(self, key: str, slo: Slo, prompt_tokens: int, now_s: float) -> bool:
        """A request came in; whether its stream was quiet or had another objective before."""
        stream = self._streams.setdefault(key, Stream(slo))
        news = not stream.seen_s or stream.slo != slo or now_s - stream.seen_s > MEMORY_S
        stream.arrived(slo, prompt_tokens, now_s)
        return news

    def of(self, key: str) -> Stream | None:
        """What is known of one; None if nothing ever came."""
        return self._streams.get(key)

    def forget(self, key: str) -> None:
        """The stream is gone."""
        self._streams.pop(key, None)

    def answered(self, key: str, tokens: int, cached_tokens: int = 0) -> None:
        """An answer ended after so many tokens; so many of its prompt were not computed."""
        if (stream := self._streams.get(key)) is not None:
            stream.answered(tokens, cached_tokens)

    def observe(self, elapsed_s: float) -> None:
        """So much time has passed: what was learned since then counts from now on."""
        for stream in self._streams.values():
            stream.observe(elapsed_s)

    def lately(self, now_s: float, waiting: Iterable[str] = ()) -> dict[str, Stream]:
        """Those that requests came to lately, or wait on."""
        keep = {key for key, stream in self._streams.items() if now_s - stream.seen_s <= MEMORY_S} | {*waiting}
        return {key: stream for key, stream in self._streams.items() if key in keep}

    @staticmethod
    def demands(streams: Mapping[str, Stream], queued: Mapping[str, int]) -> dict[str, Demand]:
        """What the macro-cycle plans for."""
        return {key: Demand(queued.get(key, 0), stream.forecast.rate) for key, stream in streams.items()}


def _coarse(value: float) -> float:
    """Within 2.2 % of the value: a shape that hardly changes stays the same, and so does what follows from it."""
    return exp2(round(16 * log2(value)) / 16) if value > 0 else 0.0
