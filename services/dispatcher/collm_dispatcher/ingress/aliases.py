"""The same measurements once more under vLLM's prefix, for dashboards and tools that know no other."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

OWN, THEIRS = "collm:", "vllm:"

SHARED = frozenset(
    f"{OWN}{name}"
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    )
)
"""What both measure alike; vLLM has no name for the rest."""


class Aliases(Collector):
    """Every family of `registry` that vLLM has too, under its name there."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """In the order of the registry."""
        for family in self._registry.collect():
            if family.name in SHARED:
                alias = Metric(_theirs(family.name), family.documentation, family.type)
                alias.samples = [_renamed(sample) for sample in family.samples]
                yield alias


def _renamed(sample: Sample) -> Sample:
    return sample._replace(name=_theirs(sample.name))


def _theirs(name: str) -> str:
    return THEIRS + name.removeprefix(OWN)
