"""Spans, as services make them. Off unless COLLM_OTLP_ENDPOINT says where they go; then nothing of them is imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from collm_common.errors import SettingsError

Kind = Literal["server", "producer", "consumer", "internal"]
Value = str | int | float | bool | tuple[str, ...]


class Span(Protocol):
    """Something that takes time; `parent` is its W3C traceparent, for what happens below it ("": nothing is traced)."""

    @property
    def parent(self) -> str: ...

    def end(self, attributes: Mapping[str, Value] | None = None, error: str = "", at_s: float | None = None) -> None:
        """It is over, now or at `at_s` (Unix seconds); `error` says by its kind that it failed."""


class Tracer(Protocol):
    """Where spans begin."""

    def begin(
        self,
        name: str,
        kind: Kind,
        parent: str,
        attributes: Mapping[str, Value] | None = None,
        at_s: float | None = None,
    ) -> Span:
        """A span that began now or at `at_s` (Unix seconds), below the `parent` that a traceparent names, if any."""


class Untraced:
    """Both tracer and span, of nothing."""

    parent = ""

    def begin(
        self,
        name: str,
        kind: Kind,
        parent: str,
        attributes: Mapping[str, Value] | None = None,
        at_s: float | None = None,
    ) -> Untraced:
        return self

    def end(self, attributes: Mapping[str, Value] | None = None, error: str = "", at_s: float | None = None) -> None:
        """Nothing was begun."""


UNTRACED = Untraced()


def tracer(service: str, instance: str, endpoint: str) -> Tracer:
    """Of a service, to an OTLP collector over HTTP; "" traces nothing. Raises SettingsError without the extra."""
    if not endpoint:
        return UNTRACED
    try:
        from collm_common.otel import exporting
    except ImportError as error:
        raise SettingsError(
            f"COLLM_OTLP_ENDPOINT needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http: {error}"
        ) from error
    return exporting(service, instance, endpoint)
