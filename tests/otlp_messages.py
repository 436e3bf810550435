"""OTLP messages and rows in few words, for the tests of decoding."""

from collections.abc import Iterable

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from perfledger.collectors.otlp_rows import SIGNALS, Decoded, decode

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
