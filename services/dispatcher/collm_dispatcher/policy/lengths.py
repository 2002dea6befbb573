"""Output lengths of a stream, learned as they come: quantiles, for prompt length does not predict them."""

from __future__ import annotations

from math import exp2, log2

STEP = 0.125
"""Width of a bucket in powers of two: a quantile is right to about 4.5 % either way."""
BUCKETS = 1 + int(20 / STEP)
FORGET = 1.0 / 2000
LEAST = 16


class Lengths:
    """A histogram over logarithmic buckets; an answer's weight halves after some 1,400 later ones."""

    def __init__(self) -> None:
        self._counts = [0.0] * BUCKETS
        self._total = self._sum = 0.0
        self._weight = 1.0
        self._seen = 0

    def observe(self, tokens: int) -> None:
        """One whole answer. Later ones weigh more, which is the same as letting the earlier ones fade."""
        tokens = max(1, tokens)
        self._seen += 1
        self._counts[min(BUCKETS - 1, round(log2(tokens) / STEP))] += self._weight
        self._total += self._weight
        self._sum += self._weight * tokens
        self._weight /= 1 - FORGET
        if self._weight > 1e9:
            self._rescale()

    @property
    def known(self) -> bool:
        """Whether enough answers were seen to say anything."""
        return self._seen >= LEAST

    @property
    def mean(self) -> float:
        """Expected tokens of an answer; 1 before the first."""
        return self._sum / self._total if self._total else 1.0

    def quantiles(self, count: int) -> tuple[float, ...]:
        """Lengths that 1/count, 2/count, .. of the answers do not exceed; () before the first answer."""
        if not self._total:
            return ()
        found: list[float] = []
        seen = 0.0
        for bucket, weight in enumerate(self._counts):
            seen += weight
            while weight and len(found) < count and seen * count >= self._total * (len(found) + 1) * (1 - 1e-9):
                found.append(exp2(bucket * STEP))
        return tuple(found)

    def _rescale(self) -> None:
        self._counts = [count / self._weight for count in self._counts]
        self._total /= self._weight
        self._sum /= self._weight
        self._weight = 1.0
