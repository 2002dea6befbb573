"""What docker-compose.yml says about services, against the services themselves; run.py runs it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from collm_common.settings import Common
from collm_coordinator.settings import CoordinatorSettings
from collm_dispatcher.settings import DispatcherSettings
from collm_launcher.settings import LauncherSettings
from collm_replica.settings import ReplicaSettings

ROOT = Path(__file__).resolve().parents[2]
SERVICES: dict[str, type[Common]] = {
    "DISPATCHER": DispatcherSettings,
    "REPLICA": ReplicaSettings,
    "LAUNCHER": LauncherSettings,
    "COORDINATOR": CoordinatorSettings,
}


@pytest.mark.parametrize("path", ["docker-compose.yml", "deploy/gpu.yml"])
def test_every_variable_is_a_setting(path: str) -> None:
    """A container that refuses its own environment, perhaps only where an operator sets something."""
    given = re.findall(rf"^ +COLLM_({'|'.join(SERVICES)})_(\w+):", (ROOT / path).read_text(), flags=re.MULTILINE)
    assert given
    known = {(name, field) for name, cls in SERVICES.items() for field in cls.__struct_fields__}
    assert [f"{service}_{name}" for service, name in given if (service, name.lower()) not in known] == []


def test_the_grace_to_stop_is_longer_than_any_drain() -> None:
    """Answers that are cut off in their middle because Docker waits less than the service does."""
    found = re.search(r"stop_grace_period: (\d+)s", (ROOT / "docker-compose.yml").read_text())
    assert found
    drains = [
        field.default for cls in SERVICES.values() for field in msgspec.structs.fields(cls) if field.name == "drain_s"
    ]
    assert int(found[1]) >= max(drains) + 10


def test_every_service_that_speaks_to_the_broker_has_a_user_of_its_own() -> None:
    """A service that the broker turns away."""
    users = re.findall(r"^user (\w+) ", (ROOT / "deploy/redis/users.acl").read_text(), flags=re.MULTILINE)
    speaking = re.findall(r"redis://(\w+):", (ROOT / "docker-compose.yml").read_text())
    assert sorted(speaking) == sorted(name.lower() for name in SERVICES)
    assert set(speaking) < set(users)
