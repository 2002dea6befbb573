"""Every Redis key, in one place. All keys of a cell share one hash tag, so that scripts hold on Redis Cluster."""

from __future__ import annotations

from msgspec import Struct


class Keys(Struct, frozen=True):
    """Key names under one prefix, by default `{collm}:`."""

    prefix: str = "{collm}:"

    def _key(self, *parts: object) -> str:
        return self.prefix + ":".join(str(part) for part in parts)

    def requests(self, model: str, slo: str) -> str:
        """An original request stream: same model, same SLO."""
        return self._key("requests", model, slo)

    def subflow(self, replica: str) -> str:
        """Paced requests for one replica."""
        return self._key("subflow", replica)

    def replies(self, ingress: str) -> str:
        """Token deltas, results and errors for one ingress."""
        return self._key("replies", ingress)

    def control(self, replica: str) -> str:
        """Commands for one replica."""
        return self._key("control", replica)

    def replica(self, replica: str) -> str:
        """Registry hash of one replica."""
        return self._key("replica", replica)

    def lease(self, holder: str) -> str:
        """Heartbeat lease of a replica, or leader lease of a stream or service."""
        return self._key("lease", holder)

    def fence(self, name: str) -> str:
        """Counter of the fencing tokens of one leader lease."""
        return self._key("fence", name)

    def latency(self, replica: str) -> str:
        """Fitted latency models of one replica."""
        return self._key("latency", replica)

    def config(self, replica: str) -> str:
        """Batch sizes chosen for one replica."""
        return self._key("config", replica)

    def recall(self, replica: str) -> str:
        """Batch sizes that a replica had before the dispatcher took training back."""
        return self._key("recall", replica)

    def adapter(self, name: str) -> str:
        """Hash of an adapter: current version, base model."""
        return self._key("adapter", name)

    def adapter_version(self, name: str, version: int) -> str:
        """Hash of one version: manifest and 1 MB chunks of safetensors."""
        return self._key("adapter", name, f"v{version}")

    def adapter_history(self, name: str) -> str:
        """Stream of the changes of an adapter's current version."""
        return self._key("adapter", name, "history")

    def server_state(self, job: str, version: int) -> str:
        """What a job's aggregation remembers beside the version that it made."""
        return self._key("job", job, f"s{version}")

    def job(self, job: str) -> str:
        """Durable state of one federated job."""
        return self._key("job", job)

    def wanted(self, model: str) -> str:
        """Hash of the jobs that clients have asked for and that have not ended: adapter -> job id."""
        return self._key("wanted", model)

    def tuning(self, job: str, tenant: str = "") -> str:
        """What a client asked for with one job; "" is the tenant of an open cell."""
        return self._key("tuning", *filter(None, [tenant]), job)

    def file(self, id_: str, tenant: str = "") -> str:
        """What is known of an uploaded file, but not its text; "" is the tenant of an open cell."""
        return self._key("file", *filter(None, [tenant]), id_)

    def tunings(self, tenant: str = "") -> str:
        """Sorted set of the jobs that clients have asked for, by time."""
        return self._key("tunings", *filter(None, [tenant]))

    def usage(self, digest: str) -> str:
        """What a client's key has used of its limits in this minute."""
        return self._key("usage", digest)

    def streaming(self, digest: str) -> str:
        """Sorted set of the answers that a client's key waits for, by when they count no more."""
        return self._key("streaming", digest)

    @property
    def api_keys(self) -> str:
        """Hash of clients' keys: digest -> what it allows."""
        return self._key("api-keys")

    @property
    def owners(self) -> str:
        """Hash: adapter -> the tenant whose it is."""
        return self._key("owners")

    @property
    def audit(self) -> str:
        """Stream of what clients and operators changed."""
        return self._key("audit")

    @property
    def paused(self) -> str:
        """Set of ids of jobs that clients have asked for and want to rest."""
        return self._key("paused")

    def files(self, tenant: str = "") -> str:
        """Sorted set of uploaded files, by time."""
        return self._key("files", *filter(None, [tenant]))

    def update(self, job: str, round_: int, replica: str) -> str:
        """One client's update of one round, deleted after aggregation."""
        return self._key("job", job, f"r{round_}", replica)

    @property
    def telemetry(self) -> str:
        """Measurements of all replicas."""
        return self._key("telemetry")

    @property
    def room(self) -> str:
        """Room that has come back at the replicas."""
        return self._key("room")

    @property
    def events(self) -> str:
        """Every state change with from, to and reason."""
        return self._key("events")

    @property
    def replicas(self) -> str:
        """Set of registered replica ids."""
        return self._key("replicas")

    @property
    def streams(self) -> str:
        """Set of original streams that were ever used, as `model|slo`."""
        return self._key("streams")

    @property
    def adapters(self) -> str:
        """Set of adapter names."""
        return self._key("adapters")

    @property
    def jobs(self) -> str:
        """Set of ids of jobs that have not ended."""
        return self._key("jobs")
