"""OTLP messages and rows in few words, for the tests of decoding."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from perfledger.collectors.attribute_values import DEFAULT_MAX_VALUE_BYTES, Tally
from perfledger.collectors.otlp_rows import SIGNALS, Outcome, Signal
from perfledger.collectors.segments import OpenSegment
from perfledger.collectors.wire.assemble import in_order, spans_table
from perfledger.collectors.wire.span_batch import SpanReader
from perfledger.schema.tables import TABLES

TRACES, METRICS, LOG_RECORDS = SIGNALS
TRACE_ID, SPAN_ID, PARENT_ID = b"t" * 16, b"s" * 8, b"p" * 8
RECEIVED_NS = 7


def any_value(value: object) -> AnyValue:
    """Write a Python value as OTLP does; None is the empty value."""
    match value:
        case None:
            return AnyValue()
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=value)
        case bytes():
            return AnyValue(bytes_value=value)
        case list():
            return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))
        case dict():
            return AnyValue(kvlist_value=KeyValueList(values=key_values(value)))
    raise TypeError(type(value))


def key_values(values: dict[str, object]) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(value)) for key, value in values.items()]


def span(**changes: object) -> Span:
    fields: dict[str, object] = {
        "trace_id": TRACE_ID,
        "span_id": SPAN_ID,
        "name": "chat",
        "start_time_unix_nano": 100,
        "end_time_unix_nano": 200,
    }
    return Span(**{**fields, **changes})


@dataclass(frozen=True)
class Decoded:
    """One request as rows of `signal.table`, and what was found in it."""

    signal: Signal
    rows: pa.Table
    tally: Tally

    @property
    def rejected(self) -> int:
        return self.tally.rejected.total()

    def response(self) -> bytes:
        return bytes(Outcome.of(self.signal, self.tally).response().SerializeToString())


def decode(
    signal: Signal,
    body: bytes,
    received_ns: int | None = None,
    max_value_bytes: int = DEFAULT_MAX_VALUE_BYTES,
) -> Decoded:
    """Take one request into a segment of its own; raise UndecodableRequest as that does."""
    received_ns = time.time_ns() if received_ns is None else received_ns
    segment = OpenSegment(SpanReader(max_value_bytes))
    taken = segment.add(signal, body, received_ns)
    table = TABLES[signal.table].arrow()
    if signal is TRACES:
        rows = spans_table(segment.spans, in_order(segment.spans)).cast(table)
    else:
        rows = pa.concat_tables([table.empty_table(), *segment.tables[signal.table]])
    return Decoded(signal, rows, taken.tally)


def decode_spans(spans: Iterable[Span], **limits: int) -> Decoded:
    request = ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])]
    )
    return decode(TRACES, request.SerializeToString(), RECEIVED_NS, **limits)


def only_row(decoded: Decoded) -> dict[str, object]:
    (row,) = decoded.rows.to_pylist()
    return row


def attributes_of(values: dict[str, object], **limits: int) -> dict[str, object]:
    """Send attributes on a span and return those of its row, without their empty fields."""
    return kept(only_row(decode_spans([span(attributes=key_values(values))], **limits)))


def kept(row: dict[str, object], column: str = "attributes") -> dict[str, object]:
    pairs = row[column]
    assert isinstance(pairs, list)
    values = {}
    for pair in pairs:
        filled = {kind: v for kind, v in pair.items() if kind != "key" and v is not None}
        assert len(filled) <= 1
        values[pair["key"]] = filled
    return values


def pair(key: str, **value: object) -> dict[str, object]:
    empty = dict.fromkeys(("text", "int", "double", "bool", "bytes", "json"))
    return {"key": key, **empty, **value}
