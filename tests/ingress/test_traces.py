"""One trace from HTTP through Redis to the replica's engine, by the SDK's own exporter."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from redis.asyncio import Redis

from collm_common import logs
from collm_common.keys import Keys
from collm_common.otel import OtelTracer
from tests.ingress.real import real_front
from tests.ingress.support import chat, text
from tests.support.models import tiny_model_folder
from tests.support.waiting import eventually

TRACE, ABOVE = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STAGES = ("queue", "prefill", "decode")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_folder(tmp_path_factory.mktemp("traces"), "llama")


def recording() -> tuple[InMemorySpanExporter, OtelTracer]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter, OtelTracer(provider)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def above(span: ReadableSpan) -> str:
    assert span.parent is not None
    return format(span.parent.span_id, "016x")


def number(span: ReadableSpan) -> str:
    assert span.context is not None
    return format(span.context.span_id, "016x")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_trace_leads_from_http_to_the_engine(redis: Redis, keys: Keys, folder: Path, stream: bool) -> None:
    """Spans that begin a trace of their own behind Redis, stages that are not the engine's, counts that are not."""
    exporter, spans = recording()
    async with real_front(redis, keys, folder, spans) as (site, _):
        headers = {"traceparent": f"00-{TRACE}-{ABOVE}-01"}
        body = chat(stream=stream, max_tokens=5, ignore_eos=True)
        async with site.http.post("/v1/chat/completions", json=body, headers=headers) as response:
            assert response.status == 200
            await response.read()
        await eventually(lambda: len(exporter.get_finished_spans()) == 6)
    found = by_name(exporter)
    assert {format(span.context.trace_id, "032x") for span in found.values() if span.context} == {TRACE}
    server, sent, served = found["chat m"], found["send request"], found["process request"]
    assert above(server) == ABOVE
    assert [above(sent), above(served)] == [number(server), number(sent)]
    assert {above(found[stage]) for stage in STAGES} == {number(served)}
    assert [server.kind, sent.kind, served.kind] == [SpanKind.SERVER, SpanKind.PRODUCER, SpanKind.CONSUMER]
    about = dict(server.attributes or {})
    assert about["gen_ai.operation.name"] == "chat"
    assert about["gen_ai.request.model"] == "m"
    assert about["gen_ai.request.max_tokens"] == about["gen_ai.usage.output_tokens"] == 5
    assert about["gen_ai.response.finish_reasons"] == ("length",)
    assert about["http.response.status_code"] == 200
    ends = [(found[stage].start_time, found[stage].end_time) for stage in STAGES]
    assert all(begin is not None and end is not None and begin <= end for begin, end in ends)
    assert [end for _, end in ends[:-1]] == [begin for begin, _ in ends[1:]]


async def test_a_refusal_ends_its_span_with_its_code(redis: Redis, keys: Keys, folder: Path) -> None:
    """A span that never ends, or an error that a trace does not show."""
    exporter, spans = recording()
    async with (
        real_front(redis, keys, folder, spans) as (site, _),
        site.http.post(
            "/v1/completions", json=text(model="none"), headers={"traceparent": "no traceparent"}
        ) as response,
    ):
        assert response.status == 404
    found = by_name(exporter)
    server = found["text_completion none"]
    assert server.parent is None
    assert server.status.status_code is StatusCode.ERROR
    assert (server.attributes or {})["error.type"] == "model_not_found"
    assert found["send request"].status.status_code is StatusCode.ERROR


def test_nothing_of_it_is_imported_where_it_is_off() -> None:
    """Half a second and forty megabytes at every start, for spans that nobody wants."""
    modules = "collm_dispatcher.__main__, collm_replica.serving, collm_launcher.__main__"
    code = f"import sys, {modules}\nfrom collm_common.tracing import tracer\ntracer('a', 'b', '')\n"
    # redis-py imports OpenTelemetry's metrics by itself where they are installed.
    ours = ("collm_common.otel", "opentelemetry.sdk.trace", "opentelemetry.exporter")
    code += f"assert not [name for name in sys.modules if name.startswith({ours})]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_log_line_as_json_names_its_request() -> None:
    """A line of several, or one that cannot be found by its request."""
    told = logs.request_id.set("abc")
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, "two\nlines of %s", ("text",), None)
    line = logs.JsonLines("dispatcher").format(record)
    logs.request_id.reset(told)
    found = json.loads(line)
    assert "\n" not in line
    assert (found["message"], found["request_id"], found["level"]) == ("two\nlines of text", "abc", "WARNING")
    assert "request_id" not in json.loads(logs.JsonLines("dispatcher").format(record))
