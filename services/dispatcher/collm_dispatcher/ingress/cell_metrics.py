"""The cell as this ingress sees it: which replica does what, how full it is, which version an adapter has."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from collm_common import messages
from collm_common.errors import MessageError
from collm_common.messages import InferenceReport
from collm_common.retry import forever
from collm_common.streams import Tail
from collm_common.types import ReplicaState
from collm_dispatcher.cell import Cell

log = logging.getLogger(__name__)
READ_COUNT = 512


class CellView(Collector):
    """Made anew with every page, from the cell and the last report of each replica in it."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._reports: dict[str, InferenceReport] = {}

    async def listen(self) -> None:
        """For ever: hear the reports."""
        tail = Tail(self._cell.redis, self._cell.keys.telemetry)

        async def step() -> None:
            for entry in await tail.read(READ_COUNT):
                try:
                    message = messages.decode(entry.data)
                except MessageError as error:
                    log.error("skipping entry %s of %s: %s", entry.entry_id, entry.key, error)
                    continue
                if isinstance(message, InferenceReport):
                    self._reports[message.replica] = message
            self._reports = {id_: last for id_, last in self._reports.items() if id_ in self._cell.members}

        await forever("telemetry", step, self._cell.clock)

    def collect(self) -> Iterator[Metric]:
        """States as one sample each, 1 for the one that holds."""
        labels = ["model_name", "replica"]
        states = GaugeMetricFamily("collm:replica_state", "1 for the state it is in", labels=[*labels, "state"])
        usable = GaugeMetricFamily("collm:replica_usable", "Alive and past its first step", labels=labels)
        limits = GaugeMetricFamily("collm:replica_batch_limit", "Most sequences at once, chosen or own", labels=labels)
        trained = GaugeMetricFamily("collm:replica_train_batch", "Samples of a training micro-step", labels=labels)
        filled = GaugeMetricFamily("collm:kv_cache_usage_perc", "KV blocks that requests hold, 0 to 1", labels=labels)
        preempted = CounterMetricFamily("collm:num_preemptions", "Sequences that were computed again", labels=labels)
        versions = GaugeMetricFamily("collm:adapter_version", "Current version", labels=["model_name", "adapter"])
        for id_, member in sorted(self._cell.members.items()):
            place = [member.info.model, id_]
            for state in ReplicaState:
                states.add_metric([*place, state.value], float(member.info.state is state))
            usable.add_metric(place, float(member.usable))
            limits.add_metric(place, member.sizes.infer if member.sizes else member.info.infer_batch_max)
            trained.add_metric(place, member.train_batch)
            if (report := self._reports.get(id_)) is not None:
                filled.add_metric(place, report.kv_usage)
                preempted.add_metric(place, report.preemptions)
        for name, adapter in sorted(self._cell.adapters.items()):
            versions.add_metric([adapter.model, name], adapter.version)
        yield from (states, usable, limits, trained, filled, preempted, versions)
