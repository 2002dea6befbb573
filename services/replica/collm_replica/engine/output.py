"""From tokens to the text a client sees, and when to stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from collm_common.types import SamplingParams
from collm_replica.engine.detokenizer import Detokenizer
from collm_replica.engine.edits import LogitEdits
from collm_replica.engine.guide import Guide
from collm_replica.engine.stops import StopFinder


class Output:
    """The answer of one request: `tokens` so far (prefix included) and why it ended, if it did."""

    def __init__(
        self,
        params: SamplingParams,
        eos: frozenset[int],
        decode: Callable[[Sequence[int]], str],
        prefix: Sequence[int],
        guide: Guide | None = None,
    ) -> None:
        """Raises InternalError if the prefix does not follow the guide."""
        self._params = params
        self._ends = frozenset(params.stop_tokens) | (frozenset() if params.ignore_eos else eos)
        self._guide = guide
        self._edits = LogitEdits(params, self._ends)
        self._detokenizer = Detokenizer(decode)
        self._stops = StopFinder(params.stop)
        self.tokens: list[int] = []
        self.finish: str | None = None
        for token in prefix:
            if self.finish is None:
                self.push(token)

    def push(self, token: int) -> str:
        """Take one more token; returns the text that is now certain, and sets `finish` (stop or length)."""
        self.tokens.append(token)
        self._edits.push(token)
        if self._guide is not None:
            self._guide.push(token)
        if token in self._ends:
            self.finish = "stop"
            return self._end()
        text = self._detokenizer.push(token)
        if len(self.tokens) > self._params.min_tokens:
            text = self._stops.push(text)
        if not self._stops.found and len(self.tokens) >= self._params.max_tokens:
            self.finish = "length"
            text += self._end()
        if self._stops.found:
            self.finish = "stop"
        return text

    def edits(self, position: int) -> dict[int, float]:
        """What is added to the logits of the answer's token number `position`, from 0."""
        return self._edits.at(position)

    @property
    def allowed(self) -> bytes | None:
        """Which tokens may come next, one bit each; None: every one."""
        return None if self._guide is None else self._guide.allowed()

    @property
    def depends(self) -> bool:
        """Whether the choice of a token needs the token before on the host."""
        return self._guide is not None or self._edits.counting

    def _end(self) -> str:
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
