"""One simulated request and what became of it."""

from __future__ import annotations

from math import inf
from typing import Literal

from msgspec import Struct

from collm_common.types import Slo

Outcome = Literal["open", "completed", "refused"]


class SimRequest(Struct, gc=False, eq=False):
    """Times are seconds into the run, lengths tokens. Only its replica knows `output_tokens`, and only at the end.

    Who has not begun by `wanted_s` can only miss its limits. `cross_entropy` (nats) is that of a reference answer
    under the version that answered: the version's mean times the request's own `difficulty`.
    """

    number: int
    arrival_s: float
    deadline_s: float
    prompt_tokens: int
    output_tokens: int
    slo: Slo
    adapter: int = 0
    max_tokens: int = 1024
    outcome: Outcome = "open"
    replica: str = ""
    released_s: float = inf
    started_s: float = inf
    first_s: float = inf
    end_s: float = inf
    wanted_s: float = inf
    difficulty: float = 1.0
    cross_entropy: float = 1.0

    @property
    def met(self) -> bool:
        """A whole answer inside every limit."""
        if self.outcome != "completed":
            return False
        return self.slo.met(self.first_s - self.arrival_s, self.end_s - self.arrival_s, self.output_tokens)
