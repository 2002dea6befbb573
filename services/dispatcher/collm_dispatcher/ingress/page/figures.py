"""This ingress's serving figures by stream, out of its own metrics."""

from __future__ import annotations

from msgspec import Struct
from prometheus_client import CollectorRegistry

OFFERED, ATTAINMENT, GOODPUT = "collm:requests_offered_total", "collm:slo_attainment", "collm:goodput_tokens_total"
NAMES = (OFFERED, ATTAINMENT, GOODPUT)


class Figures(Struct):
    """Since this ingress started; `attainment` is None while no request has ended."""

    offered: int = 0
    attainment: float | None = None
    goodput_tokens: int = 0


def figures(registry: CollectorRegistry) -> dict[tuple[str, str], Figures]:
    """By model and SLO class."""
    found: dict[tuple[str, str], Figures] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name not in NAMES:
                continue
            own = found.setdefault((sample.labels["model_name"], sample.labels["slo"]), Figures())
            match sample.name:
                case "collm:requests_offered_total":
                    own.offered = int(sample.value)
                case "collm:slo_attainment":
                    own.attainment = sample.value
                case _:
                    own.goodput_tokens = int(sample.value)
    return found
