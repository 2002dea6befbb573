"""What a run amounts to: pure functions from records to figures. Every offered request counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from msgspec import Struct

from collm_common.types import Slo
from collm_tools.load.client import RequestRecord

PERCENTILES = (50, 90, 95, 99)


class Requests(Struct, frozen=True):
    """offered = completed + rejected + failed; `cancelled` are those of the failed that this client left itself."""

    offered: int
    completed: int
    rejected: int
    failed: int
    cancelled: int = 0


class Summary(Struct, frozen=True):
    """Figures of one run; rates are per second of `duration_s`. Latencies are those of completed requests, in ms.

    `q_goodput` weighs each token of goodput by 1 / cross-entropy of its reference answer; None without references.
    """

    requests: Requests
    duration_s: float
    goodput_tokens_per_s: float
    q_goodput: float | None
    slo_attainment: float
    request_goodput_per_s: float
    throughput_tokens_per_s: float
    cross_entropy: float | None
    ttft_ms: dict[str, float]
    tpot_ms: dict[str, float]
    e2e_ms: dict[str, float]
    errors: dict[str, int]


def summarize(records: Sequence[RequestRecord], slo: Slo, duration_s: float) -> Summary:
    """`duration_s` is from the first arrival to the last end, or the offered duration if that is longer."""
    done = [record for record in records if record.outcome == "completed"]
    good = [record for record in done if record.met(slo)]
    span_s = max(duration_s, 1e-9)
    return Summary(
        requests=count(records),
        duration_s=duration_s,
        goodput_tokens_per_s=sum(record.output_tokens for record in good) / span_s,
        q_goodput=q_goodput(good, span_s) if any(record.cross_entropy for record in done) else None,
        slo_attainment=len(good) / len(records) if records else 0.0,
        request_goodput_per_s=len(good) / span_s,
        throughput_tokens_per_s=sum(record.output_tokens for record in done) / span_s,
        cross_entropy=cross_entropy(done),
        ttft_ms=percentiles(1000 * r.ttft_s for r in done if r.ttft_s is not None),
        tpot_ms=percentiles(1000 * tpot for r in done if (tpot := tpot_s(r)) is not None),
        e2e_ms=percentiles(1000 * r.e2e_s for r in done if r.e2e_s is not None),
        errors=error_counts(records),
    )


def count(records: Sequence[RequestRecord]) -> Requests:
    """How the offered requests ended."""
    outcomes = [record.outcome for record in records]
    return Requests(
        offered=len(records),
        completed=outcomes.count("completed"),
        rejected=outcomes.count("rejected"),
        failed=outcomes.count("failed"),
        cancelled=sum(record.cancelled for record in records),
    )


def q_goodput(good: Iterable[RequestRecord], span_s: float) -> float:
    """Sum of tokens / cross-entropy over answers that kept their SLO and were scored, per second."""
    return sum(r.output_tokens / r.cross_entropy for r in good if r.cross_entropy) / span_s


def cross_entropy(records: Iterable[RequestRecord]) -> float | None:
    """Mean over reference tokens (nats); None if none was scored."""
    scored = [(r.cross_entropy, max(1, r.reference_tokens)) for r in records if r.cross_entropy is not None]
    tokens = sum(weight for _, weight in scored)
    return sum(value * weight for value, weight in scored) / tokens if tokens else None


def tpot_s(record: RequestRecord) -> float | None:
    """(e2e - ttft) / (tokens - 1); None for answers of fewer than two tokens."""
    if record.ttft_s is None or record.e2e_s is None or record.output_tokens < 2:
        return None
    return (record.e2e_s - record.ttft_s) / (record.output_tokens - 1)


def percentiles(values: Iterable[float]) -> dict[str, float]:
    """mean, p50, p90, p95 and p99 (nearest rank), empty for no values."""
    ordered = sorted(values)
    if not ordered:
        return {}
    ranks = {f"p{p}": ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)] for p in PERCENTILES}
    return {"mean": math.fsum(ordered) / len(ordered), **ranks}


def error_counts(records: Iterable[RequestRecord], limit: int = 20) -> dict[str, int]:
    """How often each error was met, the most frequent `limit`."""
    counts: dict[str, int] = {}
    for record in records:
        if record.error:
            counts[record.error] = counts.get(record.error, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:limit])


def duration_s(records: Sequence[RequestRecord]) -> float:
    """Seconds from the start of the run to the last end of a request."""
    return max((record.at_s + (record.e2e_s or 0.0) for record in records), default=0.0)
