"""The dispatcher's offline objective, solved exactly for a handful of requests: the yardstick of the policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import combinations

from msgspec import Struct


class Job(Struct, frozen=True):
    """A request: both times in seconds, `deadline_s` is when its answer must be whole."""

    arrival_s: float
    deadline_s: float


class Server(Struct, frozen=True):
    """Runs one batch at a time: at most `b` requests, for `service_s(n)` seconds; each request is worth `quality`."""

    b: int
    service_s: Callable[[int], float]
    quality: float = 1.0


def best(jobs: Sequence[Job], servers: Sequence[Server]) -> float:
    """max sum of |B| Q_i over batches B (CoLLM, dispatcher: offline objective).

    A batch starts once all of it has arrived and its replica is free, and must end by its earliest deadline; each
    request is in one batch at most. Starting later never helps, so every batch starts as early as it can. Exponential:
    meant for up to 7 jobs.
    """

    @cache
    def value(left: frozenset[int], rank: int, free_s: float) -> float:
        """The best that `servers[rank:]` can still make of `left`, with servers[rank] free from `free_s`."""
        if rank == len(servers) or not left:
            return 0.0
        found = value(left, rank + 1, 0.0)
        server = servers[rank]
        for size in range(1, min(server.b, len(left)) + 1):
            for batch in combinations(sorted(left), size):
                end_s = max(free_s, *(jobs[n].arrival_s for n in batch)) + server.service_s(size)
                if end_s <= min(jobs[n].deadline_s for n in batch):
                    found = max(found, size * server.quality + value(left - frozenset(batch), rank, end_s))
        return found

    return value(frozenset(range(len(jobs))), 0, 0.0)
