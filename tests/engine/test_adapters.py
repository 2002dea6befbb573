"""Versions, slots and who uses them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collm_common.errors import AdapterError, UnknownModel
from collm_common.types import AdapterRef
from collm_replica.engine.adapters import AdapterTable
from collm_replica.engine.sequence import Pin

V1, V2 = AdapterRef("a", "1"), AdapterRef("a", "2")


def load(table: AdapterTable, ref: AdapterRef) -> int:
    slot = table.reserve()
    assert slot is not None
    table.loaded(ref, slot)
    return slot


def test_a_slot_is_free_when_its_version_is_old_and_its_last_request_ended() -> None:
    """Catches a version torn away from a running request, and a slot that is never given back."""
    table = AdapterTable(2)
    slot = load(table, V1)
    table.publish(V1)
    pins = [table.pin("a", None), table.pin("a", "1")]
    assert [(pin.ref, pin.slot) for pin in pins] == [(V1, slot)] * 2
    load(table, V2)
    assert table.reserve() is None
    assert table.publish(V2) == []
    assert table.unpin(pins[0]) == []
    assert table.unpin(pins[1]) == [slot]
    with pytest.raises(UnknownModel, match="a@v1 is not loaded"):
        table.pin("a", "1")


def test_a_version_that_is_loaded_again_has_other_weights() -> None:
    """Catches keys and values of a snapshot that are taken for those of the one that has its number now."""
    table = AdapterTable(2)
    seen = {Pin().weights}
    for _ in range(3):
        load(table, V1)
        seen.add(table.find(V1).weights)
        table.discard(V1)
    assert len(seen) == 4
    assert table.pin("a", "0").weights == table.pin("", None).weights


def test_a_shadow_serves_nobody_until_it_is_published() -> None:
    """Catches a candidate that answers before it was accepted."""
    table = AdapterTable(2)
    load(table, V1)
    with pytest.raises(UnknownModel, match="no adapter 'a' is published"):
        table.pin("a", None)
    assert table.find(V1).slot >= 0


def test_a_discarded_shadow_frees_its_slot_and_a_published_version_cannot_be_discarded() -> None:
    """Catches a rejected candidate that holds its slot, and a current version that vanishes."""
    table = AdapterTable(2)
    slot = load(table, V1)
    table.publish(V1)
    assert table.discard(V1) == []
    other = load(table, V2)
    assert table.discard(V2) == [other]
    assert table.discard(AdapterRef("b", "1")) == []
    assert table.pin("a", None) == table.find(V1)
    assert table.find(V1).slot == slot


def test_version_zero_is_the_base_model() -> None:
    """Catches a name that cannot be served before its first training, or be rolled back to the start."""
    table = AdapterTable(1)
    base = AdapterRef("a", "0")
    table.publish(base)
    assert table.pin("a", None) == Pin(base, -1)
    slot = load(table, V1)
    table.publish(V1)
    assert table.publish(base) == [slot]


def test_what_is_not_loaded_cannot_be_published() -> None:
    """Catches a current version that no request could run with."""
    with pytest.raises(AdapterError, match="a@v1 is not loaded"):
        AdapterTable(1).publish(V1)


def test_the_version_that_was_used_longest_ago_makes_room() -> None:
    """Catches a running, awaited or unrepeatable version thrown out, and one that was used a moment ago."""
    table = AdapterTable(4)
    refs = [AdapterRef("old", "1"), AdapterRef("runs", "1"), AdapterRef("own", "1.2"), AdapterRef("kept", "1")]
    slots = {}
    for ref in refs:
        slots[ref.name] = load(table, ref)
        table.publish(ref)
    table.pin("runs", None)
    assert table.evict({"old", "kept"}) == []
    table.unpin(table.pin("old", None))
    assert table.evict(()) == [slots["kept"]]
    assert table.evict(()) == [slots["old"]]
    assert table.evict(()) == []
    assert set(table.current) == {"runs", "own"}


def test_a_retired_name_is_gone_once_its_last_request_ended() -> None:
    """Catches an unloaded adapter that can still be asked for, and a slot that stays taken."""
    table = AdapterTable(1)
    slot = load(table, V1)
    table.publish(V1)
    pin = table.pin("a", None)
    assert table.retire("a") == []
    with pytest.raises(UnknownModel):
        table.pin("a", None)
    assert table.unpin(pin) == [slot]
    assert table.retire("never") == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["load", "publish", "discard", "pin", "unpin", "evict", "retire"]), st.integers(1, 5))
    )
)
def test_slots_are_never_shared_or_lost(moves: list[tuple[str, int]]) -> None:
    """Catches double frees and leaks in any order of events."""
    table = AdapterTable(3)
    pins: list[Pin] = []
    for move, number in moves:
        ref = AdapterRef("ab"[number % 2], str(number))
        if move == "load" and not table.holds(ref) and table.reserve() is not None:
            load(table, ref)
        elif move == "publish" and table.holds(ref):
            table.publish(ref)
        elif move == "discard":
            table.discard(ref)
        elif move == "evict":
            table.evict({"a"})
        elif move == "retire":
            table.retire(ref.name)
        elif move == "pin" and ref.name in table.current:
            pins.append(table.pin(ref.name, None))
        elif move == "unpin" and pins:
            table.unpin(pins.pop(number % len(pins)))
        assert all(table.find(pin.ref) == pin for pin in pins)
        assert all(table.holds(current) for current in table.current.values())
    for pin in pins:
        table.unpin(pin)
    for number in range(1, 6):
        table.discard(AdapterRef("ab"[number % 2], str(number)))
    assert table.free == 3 - len(table.current)
