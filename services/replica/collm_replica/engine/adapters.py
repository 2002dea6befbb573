"""Which adapter version is in which slot, current, or in use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from collm_common.errors import AdapterError, UnknownModel
from collm_common.types import AdapterRef
from collm_replica.engine.sequence import Pin

BASE_VERSION = "0"
"""A name's version 0 is the base model: always there, without a slot."""


class AdapterTable:
    """name -> current version -> slot, and how many requests use each version.

    A version is loaded as a shadow, then published. It leaves its slot when it is neither a shadow, nor current,
    nor used; or when it is evicted. `_slots` is in the order of last use; every load is counted, for what is kept of a
    version must not be taken for another's: a replica's own snapshots use a number again when a round is repeated.
    """

    def __init__(self, slots: int) -> None:
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[AdapterRef, Pin] = {}
        self._loads = 0
        self._shadows: set[AdapterRef] = set()
        self._users: Counter[AdapterRef] = Counter()
        self.current: dict[str, AdapterRef] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def find(self, ref: AdapterRef | None) -> Pin:
        """Where a loaded version is, without holding on to it. Raises UnknownModel."""
        if ref is None or ref.version == BASE_VERSION:
            return Pin(ref)
        if ref not in self._slots:
            raise UnknownModel(f"adapter {ref} is not loaded", param="model", code="adapter_version_not_loaded")
        return self._slots[ref]

    def holds(self, ref: AdapterRef) -> bool:
        return ref in self._slots

    def reserve(self) -> int | None:
        """A free slot to write a shadow into; nothing changes before `loaded`."""
        return self._free[-1] if self._free else None

    def loaded(self, ref: AdapterRef, slot: int) -> None:
        """`ref` was written into the reserved slot."""
        self._free.remove(slot)
        self._loads += 1
        self._slots[ref] = Pin(ref, slot, self._loads)
        self._shadows.add(ref)

    def publish(self, ref: AdapterRef) -> list[int]:
        """Make `ref` current; returns the slots that are now free. Raises AdapterError if it is not loaded."""
        if ref.version != BASE_VERSION and ref not in self._slots:
            raise AdapterError(f"adapter {ref} is not loaded and cannot be published")
        before = self.current.get(ref.name)
        self.current[ref.name] = ref
        self._shadows.discard(ref)
        self._touch(ref)
        return self._collect(before)

    def evict(self, keep: Collection[str]) -> list[int]:
        """Forget the idle version that was used longest ago; returns the slot that is now free, if any.

        Names in `keep` stay, and so do a replica's own snapshots: nobody could fetch them again.
        """
        for ref in self._slots:
            if ref.name not in keep and "." not in ref.version and ref not in self._shadows and ref not in self._users:
                del self.current[ref.name]
                return self._collect(ref)
        return []

    def retire(self, name: str) -> list[int]:
        """No new request can have the adapter; returns the slots that are now free."""
        return self._collect(self.current.pop(name, None))

    def discard(self, ref: AdapterRef) -> list[int]:
        """Drop a shadow; returns the slots that are now free."""
        self._shadows.discard(ref)
        return self._collect(ref)

    def newest(self, name: str) -> AdapterRef:
        """The current version. Raises UnknownModel if none was published."""
        if name not in self.current:
            raise UnknownModel(f"no adapter {name!r} is published here", param="model")
        return self.current[name]

    def pin(self, name: str, version: str | None) -> Pin:
        """Use a version (None: the current one) until `unpin`. Raises UnknownModel."""
        pin = self.peek(name) if version is None or not name else self.find(AdapterRef(name, version))
        if pin.ref is not None:
            self._users[pin.ref] += 1
            self._touch(pin.ref)
        return pin

    def peek(self, name: str) -> Pin:
        """What `pin` would give now. Raises UnknownModel."""
        return self.find(self.newest(name)) if name else Pin()

    def unpin(self, pin: Pin) -> list[int]:
        """A request ended; returns the slots that are now free."""
        if pin.ref is None:
            return []
        self._users[pin.ref] -= 1
        if not self._users[pin.ref]:
            del self._users[pin.ref]
        return self._collect(pin.ref)

    def _touch(self, ref: AdapterRef) -> None:
        if ref in self._slots:
            self._slots[ref] = self._slots.pop(ref)

    def _collect(self, ref: AdapterRef | None) -> list[int]:
        if ref not in self._slots or ref in self._shadows or ref in self._users or self.current.get(ref.name) == ref:
            return []
        slot = self._slots.pop(ref).slot
        self._free.append(slot)
        return [slot]
