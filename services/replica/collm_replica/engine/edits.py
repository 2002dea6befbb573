"""What is added to logits before a token is chosen: biases, penalties, and no end before its time."""

from __future__ import annotations

import math
from collections import Counter

from collm_common.types import SamplingParams


class LogitEdits:
    """Of one answer. `logit(j) + bias(j) - count(j) * frequency - (count(j) > 0) * presence` (OpenAI's definition),
    where the counts are of the answer's own tokens; `ends` are out of reach while the answer is too short."""

    def __init__(self, params: SamplingParams, ends: frozenset[int]) -> None:
        self._params = params
        self._bias = dict(params.logit_bias)
        self._banned = dict.fromkeys(ends, -math.inf) if params.min_tokens else {}
        self._counts: Counter[int] = Counter()
        self.counting = bool(params.presence_penalty or params.frequency_penalty)

    def push(self, token: int) -> None:
        """The answer has one more token."""
        if self.counting:
            self._counts[token] += 1

    def at(self, position: int) -> dict[int, float]:
        """token -> what is added to its logit for the answer's token number `position`, from 0."""
        banned = self._banned if position < self._params.min_tokens else {}
        if not self._counts:
            return self._bias | banned
        presence, frequency = self._params.presence_penalty, self._params.frequency_penalty
        bias = self._bias
        return bias | {t: bias.get(t, 0.0) - presence - n * frequency for t, n in self._counts.items()} | banned
