"""Settings from the environment: one frozen Struct a service, checked once at start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct

from collm_common.errors import SettingsError
from collm_common.keys import Keys

PREFIX = "COLLM_"
SERVICES = ("DISPATCHER", "REPLICA", "LAUNCHER", "COORDINATOR")
FOR_TESTS = "TEST"


class Common(Struct, frozen=True, kw_only=True):
    """What every service needs: COLLM_REDIS_URL, COLLM_KEY_PREFIX and COLLM_LOG_LEVEL.

    COLLM_LOG_JSON makes a JSON object of every log line; COLLM_OTLP_ENDPOINT is where spans go, "" for none.
    """

    redis_url: str = "redis://127.0.0.1:6379/0"
    key_prefix: str = "{collm}:"
    log_level: str = "INFO"
    log_json: bool = False
    otlp_endpoint: str = ""

    @property
    def keys(self) -> Keys:
        """Key names under the configured prefix."""
        return Keys(self.key_prefix)


S = TypeVar("S", bound=Common)


def load(cls: type[S], service: str, environ: Mapping[str, str] | None = None) -> S:
    """Build `cls` from COLLM_<FIELD> (fields of Common) and COLLM_<SERVICE>_<FIELD> (its own).

    Lists, mappings and nested structs are written as JSON. Raises SettingsError that names the variable: a bad
    value, a missing one, or an unknown name (another service's variables are left alone).
    """
    environ = os.environ if environ is None else environ
    shared = {field.name for field in msgspec.structs.fields(Common)}
    values: dict[str, object] = {}
    own = f"{PREFIX}{service.upper()}_"
    others = tuple(f"{PREFIX}{name}_" for name in (*SERVICES, FOR_TESTS) if name != service.upper())
    types = {field.name: field.type for field in msgspec.structs.fields(cls)}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable.startswith(others):
            continue
        is_own = variable.startswith(own)
        name = variable.removeprefix(own if is_own else PREFIX).lower()
        if name not in types or is_own == (name in shared):
            raise SettingsError(f"{variable} is not a setting of the {service} service")
        values[name] = _value(variable, text, types[name])
    try:
        return msgspec.convert(values, cls, strict=False)
    except msgspec.ValidationError as error:
        missing = [
            field.encode_name for field in msgspec.structs.fields(cls) if field.required and field.name not in values
        ]
        said = f"{own}{missing[0].upper()} is missing" if missing else f"{service} settings ({own}*): {error}"
        raise SettingsError(said) from error


def described(cls: type[Common], service: str) -> str:
    """Every variable with its default, a line each."""
    shared = Common.__struct_fields__
    lines = []
    for field in msgspec.structs.fields(cls):
        prefix = PREFIX if field.name in shared else f"{PREFIX}{service.upper()}_"
        made = field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
        default = "required" if field.required else f"default {msgspec.json.encode(made).decode()}"
        lines.append(f"  {prefix}{field.name.upper()} ({default})")
    return "\n".join(lines)


def _value(variable: str, text: str, type_: object) -> object:
    try:
        return msgspec.convert(text, type_, strict=False)
    except msgspec.ValidationError as plain:
        try:
            return msgspec.convert(msgspec.json.decode(text), type_)
        except msgspec.ValidationError as error:
            raise SettingsError(f"{variable}: {error}") from error
        except msgspec.DecodeError as error:
            said = f"not valid JSON: {error}" if text.lstrip().startswith(("{", "[")) else str(plain)
            raise SettingsError(f"{variable}: {said}") from error
