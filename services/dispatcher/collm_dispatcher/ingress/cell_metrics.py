"""The cell as this ingress sees it: which replica does what, which version an adapter has."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from collm_common.types import ReplicaState
from collm_dispatcher.cell import Cell


class CellView(Collector):
    """Read anew with every page."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def collect(self) -> Iterator[Metric]:
        """States as one sample each, 1 for the one that holds."""
        labels = ["model_name", "replica"]
        states = GaugeMetricFamily("collm:replica_state", "1 for the state it is in", labels=[*labels, "state"])
        usable = GaugeMetricFamily("collm:replica_usable", "Alive and past its first step", labels=labels)
        limits = GaugeMetricFamily("collm:replica_batch_limit", "Most sequences at once, chosen or own", labels=labels)
        trained = GaugeMetricFamily("collm:replica_train_batch", "Samples of a training micro-step", labels=labels)
        versions = GaugeMetricFamily("collm:adapter_version", "Current version", labels=["model_name", "adapter"])
        for id_, member in sorted(self._cell.members.items()):
            place = [member.info.model, id_]
            for state in ReplicaState:
                states.add_metric([*place, state.value], float(member.info.state is state))
            usable.add_metric(place, float(member.usable))
            limits.add_metric(place, member.sizes.infer if member.sizes else member.info.infer_batch_max)
            trained.add_metric(place, member.train_batch)
        for name, adapter in sorted(self._cell.adapters.items()):
            versions.add_metric([adapter.model, name], adapter.version)
        yield from (states, usable, limits, trained, versions)
