"""What Prometheus sees: vLLM's names under the prefix `collm:`, rejections, and goodput by class."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from collm_common.messages import Done
from collm_common.trouble import TROUBLES
from collm_common.types import Slo
from collm_dispatcher.ingress.aliases import Aliases

LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
RATIOS = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
COUNTS = (1, 2, 5, 10, 20, 50, 100)

OTHER = "other"


class _Faults(Collector):
    """What the broker refused in this process."""

    def collect(self) -> Iterator[CounterMetricFamily]:
        """One sample a kind."""
        family = CounterMetricFamily("collm:broker_faults", "Refusals that waiting does not heal", labels=["kind"])
        for kind, count in sorted(TROUBLES.faults.items()):
            family.add_metric([kind], count)
        yield family


class Metrics:
    """One ingress's; nothing global. Objectives of no class of `classes` count as one, or there is no end of labels.

    With `aliases` what vLLM measures too is there once more under its names.
    """

    def __init__(self, classes: Collection[str], aliases: bool = False) -> None:
        self._classes = classes
        self._aliases = CollectorRegistry()
        self.registry = registry = CollectorRegistry()
        model, by_class = ["model_name"], ["model_name", "slo"]
        self.running = Gauge("collm:num_requests_running", "Requests that get tokens", model, registry=registry)
        self.waiting = Gauge("collm:num_requests_waiting", "Requests without a token", model, registry=registry)
        self.prompt_tokens = Counter("collm:prompt_tokens", "Prompt tokens", model, registry=registry)
        self.generation_tokens = Counter("collm:generation_tokens", "Output tokens", model, registry=registry)
        self.prefix_queries = Counter(
            "collm:prefix_cache_queries", "Prompt tokens that were looked for in KV blocks", model, registry=registry
        )
        self.prefix_hits = Counter(
            "collm:prefix_cache_hits", "Prompt tokens that were found there", model, registry=registry
        )
        self.success = Counter(
            "collm:request_success", "Whole answers", ["model_name", "finished_reason"], registry=registry
        )
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token", LATENCY_S)
        self.itl = self._histogram("inter_token_latency_seconds", "Between two tokens", TOKEN_S)
        self.tpot = self._histogram("request_time_per_output_token_seconds", "(e2e - ttft) / (tokens - 1)", TOKEN_S)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", LATENCY_S)
        self.queue = self._histogram("request_queue_time_seconds", "Before prefill", LATENCY_S)
        self.prefill = self._histogram("request_prefill_time_seconds", "From admission to the first token", LATENCY_S)
        self.decode = self._histogram("request_decode_time_seconds", "From the first to the last token", LATENCY_S)
        self.inference = self._histogram("request_inference_time_seconds", "Prefill and decode", LATENCY_S)
        self.prompts = self._histogram("request_prompt_tokens", "Prompt tokens of a request", SIZES)
        self.outputs = self._histogram("request_generation_tokens", "Output tokens of a request", SIZES)
        self.choices = self._histogram("request_params_n", "Choices that were asked for", COUNTS)
        self.limits = self._histogram("request_params_max_tokens", "Output tokens that were allowed", SIZES)
        self.rejected = Counter("collm:requests_rejected", "Refused or failed", ["reason"], registry=registry)
        self.cancelled = Counter("collm:requests_cancelled", "Whose client left", model, registry=registry)
        self.again = Counter("collm:requests_redispatched", "Continued on another replica", model, registry=registry)
        self.feedback = Counter("collm:feedback", "What clients said of answers", ["kind"], registry=registry)
        self.offered = Counter("collm:requests_offered", "Accepted ones, by class", by_class, registry=registry)
        self.met = Counter("collm:requests_slo_met", "Inside every limit", by_class, registry=registry)
        self.goodput_tokens = Counter(
            "collm:goodput_tokens", "Output tokens of requests inside every limit", by_class, registry=registry
        )
        self.attainment = Gauge("collm:slo_attainment", "Share of offered that met it", by_class, registry=registry)
        registry.register(_Faults())
        stage = ["model_name", "stage"]
        self.predicted = Counter(
            "collm:predicted_seconds", "Expected at release: time to first token, per token", stage, registry=registry
        )
        self.outcome = Counter(
            "collm:outcome_seconds", "Measured at the replica, of the same requests", stage, registry=registry
        )
        self.ratio = Histogram("collm:outcome_over_predicted", "1 is exact", stage, registry=registry, buckets=RATIOS)
        if aliases:
            self._aliases.register(Aliases(registry))
        self._shares: dict[tuple[str, str], list[int]] = {}

    def accepted(self, model: str, slo: Slo, prompt_tokens: int, max_tokens: int) -> None:
        """A new request, which waits."""
        self.prompts.labels(model).observe(prompt_tokens)
        self.limits.labels(model).observe(max_tokens)
        self.waiting.labels(model).inc()
        self.offered.labels(model, self._class(slo)).inc()
        self.prompt_tokens.labels(model).inc(prompt_tokens)

    def finished(self, model: str, slo: Slo, ttft_s: float, e2e_s: float, tokens: int, finish: str) -> None:
        """A whole answer; latencies from its arrival."""
        self.success.labels(model, finish).inc()
        self.e2e.labels(model).observe(e2e_s)
        self.generation_tokens.labels(model).inc(tokens)
        self.outputs.labels(model).observe(tokens)
        if tokens > 1:
            self.tpot.labels(model).observe((e2e_s - ttft_s) / (tokens - 1))
        good = slo.met(ttft_s, e2e_s, tokens)
        if good:
            self.met.labels(model, self._class(slo)).inc()
            self.goodput_tokens.labels(model, self._class(slo)).inc(tokens)
        self._share(model, slo, good)

    def compared(self, model: str, done: Done) -> None:
        """What the dispatch loop expected of a request beside what it took; nothing where it expected nothing."""
        if (expected := done.expected) is None:
            return
        pairs = (("first_token", expected.first_s, done.first_s), ("token", expected.token_s, done.token_s))
        for stage, predicted_s, outcome_s in pairs:
            if outcome_s is not None and predicted_s > 0:
                self.predicted.labels(model, stage).inc(predicted_s)
                self.outcome.labels(model, stage).inc(outcome_s)
                self.ratio.labels(model, stage).observe(outcome_s / predicted_s)

    def reused(self, model: str, prompt_tokens: int, done: Done) -> None:
        """How much of a prompt was computed before."""
        self.prefix_queries.labels(model).inc(prompt_tokens)
        self.prefix_hits.labels(model).inc(done.cached_tokens)

    def timed(self, model: str, queue_s: float, done: Done) -> None:
        """Where the time of a whole answer went."""
        self.queue.labels(model).observe(queue_s)
        self.prefill.labels(model).observe(done.prefill_s)
        self.decode.labels(model).observe(done.decode_s)
        self.inference.labels(model).observe(done.prefill_s + done.decode_s)

    def missed(self, model: str, slo: Slo) -> None:
        """An offered request without a whole answer."""
        self._share(model, slo, False)

    def page(self) -> bytes:
        """The text format."""
        return bytes(generate_latest(self.registry) + generate_latest(self._aliases))

    def _class(self, slo: Slo) -> str:
        return slo.name if slo.name in self._classes else OTHER

    def _share(self, model: str, slo: Slo, good: bool) -> None:
        label = (model, self._class(slo))
        share = self._shares.setdefault(label, [0, 0])
        share[0] += good
        share[1] += 1
        self.attainment.labels(*label).set(share[0] / share[1])

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"collm:{name}", about, ["model_name"], registry=self.registry, buckets=buckets)
