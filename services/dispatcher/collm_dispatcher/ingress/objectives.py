"""Which objective a request gets: a class by name, limits of its own, or the default; and whose it is.

Each header has a second spelling, the one of llm-d's endpoint picker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec
from multidict import MultiMapping

from collm_common.errors import InvalidRequest, SettingsError
from collm_common.types import Slo
from collm_dispatcher.ingress.body import SloLimits
from collm_dispatcher.settings import DEFAULT

LIMITS = {
    limit: (f"x-slo-{name}-ms", f"x-llm-d-slo-{name}-ms")
    for limit, name in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("e2e_ms", "e2e"))
}
CLASS = ("x-slo-class", "x-llm-d-inference-objective")
TENANT = "x-llm-d-inference-fairness-id"
MAX_TENANT = 128
NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]{1,3})?")


def classes(configured: Mapping[str, Mapping[str, float | str]]) -> dict[str, Slo]:
    """The configured classes and a default without limits. Raises SettingsError."""
    found = {DEFAULT: Slo(DEFAULT)}
    for name, limits in configured.items():
        try:
            found[name] = msgspec.convert({"name": name, **limits}, Slo, strict=False)
        except msgspec.ValidationError as error:
            raise SettingsError(f"COLLM_DISPATCHER_SLO_CLASSES: {name}: {error}") from error
    return found


def choose(known: Mapping[str, Slo], headers: Mapping[str, str], field: str | SloLimits | None) -> Slo:
    """Headers go before the body's field. Raises InvalidRequest that names the header or field."""
    if (said := _said(headers, CLASS)) and said[1]:
        return _named(known, said[1], said[0])
    found = {limit: said for limit, names in LIMITS.items() if (said := _said(headers, names))}
    if found:
        return _own({limit: _number(text, header) for limit, (header, text) in found.items()})
    if isinstance(field, str):
        return _named(known, field, "slo")
    limits = {} if field is None else {k: v for k, v in msgspec.structs.asdict(field).items() if v is not None}
    return _own(limits) if limits else known[DEFAULT]


def tenant(headers: Mapping[str, str]) -> str:
    """Whose request it is, "" for everybody who does not say. Raises InvalidRequest."""
    _, name = _said(headers, (TENANT,)) or ("", "")
    if len(name) > MAX_TENANT:
        raise InvalidRequest(f"{TENANT}: {len(name)} characters, the limit is {MAX_TENANT}", param=TENANT)
    if name and not name.isprintable():
        raise InvalidRequest(f"{TENANT}: must be printable UTF-8", param=TENANT)
    return name


def _said(headers: Mapping[str, str], names: Iterable[str]) -> tuple[str, str] | None:
    """The spelling in which a header is there, and its value. Raises InvalidRequest where two values contradict."""
    said: list[tuple[str, str]] = []
    for name in names:
        if name in headers:
            values = headers.getall(name) if isinstance(headers, MultiMapping) else [headers[name]]
            said += [(name, value) for value in values]
    if len({value for _, value in said}) > 1:
        name, value = said[-1]
        raise InvalidRequest(f"{name}: {value[:80]!r} contradicts {said[0][0]}: {said[0][1][:80]!r}", param=name)
    return said[0] if said else None


def _named(known: Mapping[str, Slo], name: str, param: str) -> Slo:
    if name not in known:
        raise InvalidRequest(f"{param}: no class {name!r}; there are {', '.join(sorted(known))}", param=param)
    return known[name]


def _own(limits_ms: Mapping[str, float]) -> Slo:
    """Named by its limits, so that equal objectives share a stream: ttft500-tpot50-e2e5000."""
    whole = {limit.removesuffix("_ms"): max(1, round(value)) for limit, value in limits_ms.items()}
    name = "-".join(f"{limit}{value}" for limit, value in whole.items())
    return msgspec.convert({"name": name} | {f"{limit}_s": value / 1000 for limit, value in whole.items()}, Slo)


def _number(text: str, header: str) -> float:
    value = float(text) if NUMBER.fullmatch(text) else 0.0
    if not 0 < value <= 3_600_000:
        raise InvalidRequest(f"{header}: {text!r} is not a number of milliseconds in (0, 3600000]", param=header)
    return value
