"""Writes what the settings classes allow into the schema of the Helm chart's values.

After a setting has changed: `python -m scripts.chart_schema`, as CONTRIBUTING.md says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from collm_common.settings import Common
from collm_coordinator.settings import CoordinatorSettings
from collm_dispatcher.settings import DispatcherSettings
from collm_launcher.settings import LauncherSettings
from collm_replica.settings import ReplicaSettings

FILE = Path(__file__).resolve().parents[1] / "deploy/helm/collm/values.schema.json"
CLASSES: dict[str, type[Common]] = {
    "dispatcher": DispatcherSettings,
    "replica": ReplicaSettings,
    "launcher": LauncherSettings,
    "coordinator": CoordinatorSettings,
}
OF_THE_CHART = {
    "dispatcher": {"id", "models", "host", "port", "adapter_dir"},
    "replica": {
        "id",
        "model",
        "served_name",
        "cache_dir",
        "data_dir",
        "run_dir",
        "device",
        "host",
        "port",
        "advertise_host",
    },
    "launcher": {"adapters"},
    "coordinator": set[str](),
}
"""Settings that the chart itself gives."""
NOISE = ("title", "description", "default", "required")


def with_settings(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with one definition a service, and what these refer to; other definitions stay."""
    _, parts = msgspec.json.schema_components(CLASSES.values(), ref_template="#/definitions/{name}")
    made = {name: _plain(part) for name, part in parts.items()}
    for service, cls in CLASSES.items():
        definition = made[cls.__name__]
        given = OF_THE_CHART[service] | set(Common.__struct_fields__)
        definition["properties"] = {name: what for name, what in definition["properties"].items() if name not in given}
        definition["required"] = sorted(set(definition.get("required", ())) - given)
        definition["additionalProperties"] = False
    return schema | {"definitions": schema["definitions"] | made}


def _plain(schema: Any) -> Any:
    """Without what tells a program nothing, nor what the regular expressions of Go do not know."""
    if isinstance(schema, list):
        return [_plain(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if "properties" in schema:
        schema = schema | {"properties": {name: _plain(part) for name, part in schema["properties"].items()}}
        return {
            key: part if key == "properties" else _plain(part)
            for key, part in schema.items()
            if key not in NOISE or (key == "required" and part)
        }
    kept = {key: _plain(part) for key, part in schema.items() if key not in NOISE}
    if "pattern" in kept:
        kept["pattern"] = kept["pattern"].removesuffix(r"(?!\n)")
    return kept


def main() -> None:
    """Rewrite the file."""
    made = with_settings(json.loads(FILE.read_text()))
    FILE.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
