"""What a client may call `model`: a served model, an adapter, or one version of it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct

from collm_common.errors import Unavailable, UnknownModel
from collm_dispatcher.cell import Cell

VERSION = re.compile(r"^(?P<name>.+)@v(?P<version>[0-9]+)$")


class Target(Struct, frozen=True):
    """A model with an adapter ("" for none) and the version pinned by the request, if any."""

    model: str
    adapter: str = ""
    version: str | None = None


class Directory:
    """Names from the settings (models) and the cell (adapters, contexts)."""

    def __init__(self, models: Mapping[str, str], cell: Cell) -> None:
        self._models, self._cell = models, cell

    def find(self, name: str, hidden: Collection[str] = ()) -> Target:
        """Raises UnknownModel, also for the adapters that are `hidden` from whoever asks."""
        if name in self._models:
            return Target(name)
        wanted, version = (found["name"], found["version"]) if (found := VERSION.match(name)) else (name, None)
        adapter = self._cell.adapters.get(wanted)
        if adapter is None or wanted in hidden or adapter.model not in self._models:
            raise UnknownModel(f"no model or adapter {name!r}", param="model")
        if version is not None and int(version) > adapter.version:
            raise UnknownModel(
                f"{wanted} has no version {version}, the current one is {adapter.version}", param="model"
            )
        return Target(adapter.model, wanted, version)

    def context_tokens(self, model: str, retry_after_s: float) -> int:
        """What every replica of it can hold. Raises Unavailable when none is alive."""
        contexts = [member.info.context_tokens for member in self._cell.of(model) if member.info.alive]
        if not contexts:
            raise Unavailable(f"no replica of {model} is alive", code="no_replica", retry_after_s=retry_after_s)
        return min(contexts)

    def any_ready(self) -> bool:
        """Whether some model can be served right now."""
        return any(member.usable for model in self._models for member in self._cell.of(model))

    def listing(self, created: int, hidden: Collection[str] = ()) -> list[dict[str, Any]]:
        """The entries of /v1/models: adapters have their base as parent and their current version."""
        entries: list[dict[str, Any]] = [
            {"id": name, "object": "model", "created": created, "owned_by": "collm", "root": name, "parent": None}
            for name in self._models
        ]
        for name, adapter in sorted(self._cell.adapters.items()):
            if adapter.model in self._models and name not in hidden:
                shared = {"object": "model", "created": created, "owned_by": "collm"}
                own = {"root": f"{name}@v{adapter.version}", "parent": adapter.model, "version": adapter.version}
                entries.append({"id": name, **shared, **own})
        return entries
