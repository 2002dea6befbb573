"""Spans by OpenTelemetry's SDK; imported only where spans are wanted."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from collm_common.tracing import Kind, Value

HEADER = "traceparent"
KINDS = {kind.name.lower(): kind for kind in SpanKind}
_format = TraceContextTextMapPropagator()


class OtelSpan:
    """One span of the SDK."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def parent(self) -> str:
        """W3C traceparent."""
        carrier: dict[str, str] = {}
        _format.inject(carrier, set_span_in_context(self._span, Context()))
        return carrier.get(HEADER, "")

    def end(self, attributes: Mapping[str, Value] | None = None, error: str = "", at_s: float | None = None) -> None:
        self._span.set_attributes(dict(attributes or {}))
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(_nanoseconds(at_s))


class OtelTracer:
    """Spans of one provider; a traceparent that is none begins a new trace."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("collm")

    def begin(
        self,
        name: str,
        kind: Kind,
        parent: str,
        attributes: Mapping[str, Value] | None = None,
        at_s: float | None = None,
    ) -> OtelSpan:
        context = _format.extract({HEADER: parent}, Context()) if parent else Context()
        start = _nanoseconds(at_s)
        return OtelSpan(self._tracer.start_span(name, context, KINDS[kind], dict(attributes or {}), start_time=start))


def exporting(service: str, instance: str, endpoint: str) -> OtelTracer:
    """Sends spans in batches, from a thread; what a collector does not take is dropped."""
    about = {"service.namespace": "collm", "service.name": f"collm-{service}", "service.instance.id": instance}
    provider = TracerProvider(resource=Resource.create(about))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces")))
    return OtelTracer(provider)


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)
