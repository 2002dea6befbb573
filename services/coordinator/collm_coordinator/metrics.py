"""What Prometheus sees of the coordinator: predicted against measured, how good the fits are, what was chosen."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from collm_common.latency import LatencyModel
from collm_common.types import BatchSizes
from collm_coordinator.comparison import Comparison

ERRORS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0)


class Metrics:
    """One coordinator's; nothing global."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        part, replica = ["replica", "part"], ["replica"]
        prefix = "collm:latency_"
        self.predicted = Gauge(prefix + "predicted_seconds", "By the law, of the last report", part, registry=registry)
        self.measured = Gauge(prefix + "measured_seconds", "Of the last report", part, registry=registry)
        self.error = Histogram(
            prefix + "relative_error", "|measured / predicted - 1|", ["part"], registry=registry, buckets=ERRORS
        )
        self.drifts = Counter(prefix + "drifts", "Lasting shifts that had the law scaled", part, registry=registry)
        self.refused = Counter(prefix + "fits_refused", "Fits that were not used", replica, registry=registry)
        self.r2 = Gauge(prefix + "fit_r2", "Of the law in use", part, registry=registry)
        self.points = Gauge(prefix + "fit_points", "Of the law in use", part, registry=registry)
        self.chosen = Gauge("collm:batch_size_chosen", "B (train), b (infer)", part, registry=registry)
        self.share = Gauge("collm:sm_share_chosen", "Of the trainer", replica, registry=registry)
        self.dangers = Counter(
            "collm:slo_dangers", "Sizes changed at once because the SLO was in danger", replica, registry=registry
        )

    def compared(self, replica: str, comparisons: Iterable[Comparison]) -> None:
        """One report of a replica, beside what its law said."""
        for comparison in comparisons:
            labels = replica, comparison.part
            self.predicted.labels(*labels).set(comparison.predicted_s)
            self.measured.labels(*labels).set(comparison.measured_s)
            self.error.labels(comparison.part).observe(abs(comparison.ratio - 1))
            if comparison.drifted is not None:
                self.drifts.labels(*labels).inc()

    def fitted(self, replica: str, law: LatencyModel) -> None:
        """A law that is in use now."""
        for part, line in (("infer", law.infer), ("alone", law.alone), ("train", law.train)):
            if line is not None:
                self.r2.labels(replica, part).set(line.r2)
                self.points.labels(replica, part).set(line.n)

    def configured(self, replica: str, sizes: BatchSizes) -> None:
        """Sizes that were sent."""
        self.chosen.labels(replica, "train").set(sizes.train)
        self.chosen.labels(replica, "infer").set(sizes.infer)
        self.share.labels(replica).set(sizes.sm_share)

    def forget(self, replica: str) -> None:
        """A replica that is gone."""
        for part in ("infer", "alone", "train"):
            for metric in (self.predicted, self.measured, self.drifts, self.r2, self.points, self.chosen):
                metric.remove(replica, part)
        for metric in (self.refused, self.share, self.dangers):
            metric.remove(replica)

    def serve(self, port: int) -> None:
        """Answer GET /metrics on every interface, from a thread that ends with the process. Raises OSError."""
        start_http_server(port, registry=self.registry)
