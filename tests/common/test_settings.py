"""A bad setting stops the start and names the variable."""

from __future__ import annotations

from typing import Annotated

import pytest
from msgspec import Meta

from collm_common.errors import SettingsError
from collm_common.settings import Common, described, load
from collm_common.types import Slo


class Example(Common, frozen=True, kw_only=True):
    port: Annotated[int, Meta(ge=1, le=65535)]
    share: float = 0.5
    on: bool = False
    name: str | None = None
    classes: tuple[Slo, ...] = ()


def test_values_come_from_the_environment() -> None:
    """A field that is never read, or text that is not converted."""
    environ = {
        "COLLM_REPLICA_PORT": "80",
        "COLLM_REPLICA_ON": "true",
        "COLLM_REPLICA_NAME": "a",
        "COLLM_REDIS_URL": "redis://x",
        "COLLM_REPLICA_CLASSES": '[{"name": "chat", "e2e_s": 2}]',
        "COLLM_LAUNCHER_TICK": "another service's",
        "PATH": "/bin",
    }
    settings = load(Example, "replica", environ)
    assert settings == Example(redis_url="redis://x", port=80, on=True, name="a", classes=(Slo("chat", e2e_s=2.0),))
    assert settings.keys.telemetry == "{collm}:telemetry"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("COLLM_REPLICA_PORT", "0"),
        ("COLLM_REPLICA_PORT", "x"),
        ("COLLM_REPLICA_SHARE", "half"),
        ("COLLM_REPLICA_PROT", "80"),
        ("COLLM_REPLICA_REDIS_URL", "redis://x"),
        ("COLLM_PORT", "80"),
        ("COLLM_REPLICA_CLASSES", '[{"name": "chat", "e2e": 2}]'),
    ],
)
def test_a_bad_variable_is_named(variable: str, value: str) -> None:
    """A typo in a variable that is silently ignored."""
    with pytest.raises(SettingsError, match=variable):
        load(Example, "replica", {"COLLM_REPLICA_PORT": "80", variable: value})


def test_a_missing_value_is_named() -> None:
    """A service that starts without something it needs."""
    with pytest.raises(SettingsError, match="COLLM_REPLICA_PORT is missing"):
        load(Example, "replica", {})


def test_what_is_no_json_is_called_so() -> None:
    """A lost bracket that is told as a wrong type."""
    with pytest.raises(SettingsError, match="COLLM_REPLICA_CLASSES: not valid JSON"):
        load(Example, "replica", {"COLLM_REPLICA_PORT": "80", "COLLM_REPLICA_CLASSES": '[{"name": "chat"'})


def test_every_variable_can_be_listed() -> None:
    """A help that forgets a setting, or names it as nobody may write it."""
    lines = described(Example, "replica").splitlines()
    assert "  COLLM_REPLICA_PORT (required)" in lines
    assert "  COLLM_REPLICA_SHARE (default 0.5)" in lines
    assert '  COLLM_LOG_LEVEL (default "INFO")' in lines
