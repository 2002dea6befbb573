"""Which objective a request gets: a class by name, limits of its own, or the default; and whose it is.

Each header has a second spelling, the one of llm-d's endpoint picker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

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
    for header in CLASS:
        if name := headers.get(header):
            return _named(known, name, header)
    found = {limit: _first(headers, names) for limit, names in LIMITS.items()}
    if any(header is not None for header in found.values()):
        return _own({limit: _number(headers[header], header) for limit, header in found.items() if header is not None})
    if isinstance(field, str):
        return _named(known, field, "slo")
    limits = {} if field is None else {k: v for k, v in msgspec.structs.asdict(field).items() if v is not None}
    return _own(limits) if limits else known[DEFAULT]


def tenant(headers: Mapping[str, str]) -> str:
    """Whose request it is, "" for everybody who does not say. Raises InvalidRequest."""
    name = headers.get(TENANT, "")
    if len(name) > MAX_TENANT:
        raise InvalidRequest(f"{TENANT}: {len(name)} characters, the limit is {MAX_TENANT}", param=TENANT)
    if name and not name.isprintable():
        raise InvalidRequest(f"{TENANT}: must be printable UTF-8", param=TENANT)
    return name


def _first(headers: Mapping[str, str], names: Iterable[str]) -> str | None:
    return next((name for name in names if name in headers), None)


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
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3_600_000:
        raise InvalidRequest(f"{header}: {text!r} is not a number of milliseconds in (0, 3600000]", param=header)
    return value
