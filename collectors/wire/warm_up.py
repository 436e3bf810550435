"""Runs every kernel once, so that none is compiled while a request waits."""

import tempfile
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from perfledger.collectors.lenient_messages import TRACES_REQUEST
from perfledger.collectors.wire.assemble import in_order, spans_table
from perfledger.collectors.wire.census import has_too_many_messages
from perfledger.collectors.wire.recent_spans import RecentSpans
from perfledger.collectors.wire.span_batch import SpanBatch, SpanReader

_LIMIT_BYTES = 64


def warm_up() -> None:
    """Take a request with one of each: compiled kernels are loaded, or made and kept."""
    batch = SpanBatch(SpanReader(_LIMIT_BYTES), spans=4)
    for _ in range(2):
        batch.add(_request().SerializeToString(), 1)
    with tempfile.TemporaryDirectory() as folder:
        is_new, _ = RecentSpans(Path(folder)).take_new(batch)
    has_too_many_messages(b"", TRACES_REQUEST)
    order = in_order(batch)
    spans_table(batch, order[is_new[order]])


def _request() -> ExportTraceServiceRequest:
    def text(value: str) -> AnyValue:
        return AnyValue(string_value=value)

    attributes = [
        KeyValue(key="perfledger.tenant", value=text("x")),
        KeyValue(key="perfledger.rank", value=AnyValue(int_value=1)),
        KeyValue(key="long", value=text("x" * 2 * _LIMIT_BYTES)),
        KeyValue(key="array", value=AnyValue(array_value=ArrayValue(values=[text("x")]))),
        KeyValue(key="quoted", value=AnyValue(array_value=ArrayValue(values=[text('"')]))),
        KeyValue(key="messages", value=text("x")),
    ]
    event = Span.Event(name="event", time_unix_nano=1, attributes=attributes)
    link = Span.Link(trace_id=b"x" * 16, span_id=b"x" * 8, attributes=attributes)
    span = Span(
        trace_id=b"x" * 16,
        span_id=b"x" * 8,
        name="x" * 2 * _LIMIT_BYTES,
        attributes=attributes,
        events=[event],
        links=[link],
    )
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])]
    )
