"""What a local stack consists of, and the environment each of its services gets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from collm_common.errors import SettingsError
from collm_common.settings import FOR_TESTS, PREFIX, SERVICES, Common
from collm_tools.stack.service import Spec

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
SHARED = tuple(f"{PREFIX}{name.upper()}" for name in Common.__struct_fields__)
OF_SERVICES = tuple(f"{PREFIX}{service}_" for service in SERVICES)
OF_OTHERS = tuple(f"{PREFIX}{name}_" for name in (FOR_TESTS, "GPU", "BASE", "BUILD", "PIP", "MODEL", "DATA"))
"""Of tests and of docker compose."""


@dataclass(frozen=True)
class StackOptions:
    """`model` is a folder, hub name or GGUF file; `data_dirs` are one a replica (made inside `run_dir` if empty).

    `env` are settings of services by variable name; they override the caller's environment. An empty `redis_url`
    means an embedded broker on `redis_port` (0: any free port), which runs `redis_server` if that names one; a `port`
    of 0 is any free one for the HTTP service.
    """

    model: str
    served_name: str
    run_dir: Path
    replicas: int = 3
    host: str = "127.0.0.1"
    port: int = 8000
    redis_url: str = ""
    redis_port: int = 0
    redis_server: str = ""
    data_dirs: Sequence[Path] = ()
    cache_dir: Path = Path(".cache/models")
    env: Mapping[str, str] = field(default_factory=dict)
    ready_s: float = 300.0
    grace_s: float = 35.0

    def __post_init__(self) -> None:
        if self.data_dirs and len(self.data_dirs) != self.replicas:
            raise SettingsError(f"data: {len(self.data_dirs)} folders for {self.replicas} replicas; give one for each")

    @property
    def replica_ids(self) -> list[str]:
        """r1, r2, …"""
        return [f"r{number}" for number in range(1, self.replicas + 1)]

    def data_dir(self, index: int) -> Path:
        """The private data of replica `index`, counted from 0."""
        return self.data_dirs[index] if self.data_dirs else self.run_dir / "data" / self.replica_ids[index]


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Those that look like settings and are nobody's: a typo in a service's name."""
    known = (*OF_SERVICES, *OF_OTHERS)
    return sorted(key for key in environ if key.startswith(PREFIX) and key not in SHARED and not key.startswith(known))


def service_specs(options: StackOptions, model: Path | str, redis_url: str, port: int) -> list[Spec]:
    """Every service but the broker, in the order of start. `model` is the resolved folder."""
    shared = {key: value for key, value in os.environ.items() if key.startswith(OF_SERVICES) or key in SHARED}
    shared |= {f"{PREFIX}REDIS_URL": redis_url} | dict.fromkeys(THREAD_VARIABLES, "1") | dict(options.env)
    dispatcher = {"HOST": options.host, "PORT": str(port), "MODELS": json.dumps({options.served_name: str(model)})}
    specs = [_spec("dispatcher", "dispatcher", dispatcher, shared)]
    for index, replica in enumerate(options.replica_ids):
        own = {
            "ID": replica,
            "MODEL": str(model),
            "SERVED_NAME": options.served_name,
            "CACHE_DIR": str(options.cache_dir.resolve()),
            "DATA_DIR": str(options.data_dir(index).resolve()),
            "RUN_DIR": str(options.run_dir.resolve()),
        }
        specs.append(replace(_spec(f"replica-{replica}", "replica", own, shared), may_leave=True))
    return [*specs, _spec("launcher", "launcher", {}, shared), _spec("coordinator", "coordinator", {}, shared)]


def _spec(name: str, service: str, own: Mapping[str, str], shared: Mapping[str, str]) -> Spec:
    settings = {f"{PREFIX}{service.upper()}_{key}": value for key, value in own.items()}
    return Spec(name, [sys.executable, "-m", f"collm_{service}"], {**shared, **settings})
