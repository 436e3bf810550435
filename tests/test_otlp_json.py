"""OTLP's JSON becomes the protobuf that says the same, or is refused with the path to the fault."""

import json
from collections.abc import Callable

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_json_text import as_json

from perfledger.collectors.transport.otlp_json import (
    MOST_VALUES,
    TooManyValuesError,
    UnreadableJsonError,
    to_protobuf,
)

REQUESTS = (ExportTraceServiceRequest, ExportMetricsServiceRequest, ExportLogsServiceRequest)
F = FieldDescriptor
SCALARS = {
    F.TYPE_BOOL: st.booleans(),
    F.TYPE_BYTES: st.binary(max_size=20),
    F.TYPE_DOUBLE: st.floats(),
    F.TYPE_ENUM: st.integers(-(2**31), 2**31 - 1) | st.integers(0, 5),
    F.TYPE_FIXED32: st.integers(0, 2**32 - 1),
    F.TYPE_FIXED64: st.integers(0, 2**64 - 1),
    F.TYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    F.TYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    F.TYPE_SFIXED64: st.integers(-(2**63), 2**63 - 1),
    F.TYPE_SINT32: st.integers(-(2**31), 2**31 - 1),
    F.TYPE_STRING: st.text(max_size=8) | st.text(min_size=100, max_size=140),
    F.TYPE_UINT32: st.integers(0, 2**32 - 1),
    F.TYPE_UINT64: st.integers(0, 2**64 - 1),
}


@st.composite
def messages(draw: st.DrawFn, kind: type[Message]) -> Message:
    """Draw any message of a type, from its descriptor: every field it has can occur."""
    message = kind()
    _fill(draw, message, message.DESCRIPTOR, 14)
    return message


def _fill(draw: st.DrawFn, message: Message, descriptor: Descriptor, room: int) -> None:
    for field in draw(st.lists(st.sampled_from(list(descriptor.fields)), max_size=4, unique=True)):
        if field.type != F.TYPE_MESSAGE:
            one = SCALARS[field.type]
            if field.is_repeated:
                getattr(message, field.name).extend(draw(st.lists(one, max_size=3)))
            else:
                setattr(message, field.name, draw(one))
        elif room and field.is_repeated:
            for _ in range(draw(st.integers(1, 2))):
                _fill(draw, getattr(message, field.name).add(), field.message_type, room - 1)
        elif room:
            part = getattr(message, field.name)
            part.SetInParent()
            _fill(draw, part, field.message_type, room - 1)


any_message = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("kind", REQUESTS)
def test_any_request_means_the_same_in_both_encodings(kind: type[Message]) -> None:
    @any_message
    @given(messages(kind))
    def holds(message: Message) -> None:
        read = kind.FromString(to_protobuf(kind, as_json(message).encode()))
        # Through text: NaN is not equal to itself.
        assert as_json(read) == as_json(message)

    holds()


def span_json(span: object) -> bytes:
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()


def read_span(span: dict[str, object]) -> Message:
    request = ExportTraceServiceRequest.FromString(
        to_protobuf(ExportTraceServiceRequest, span_json(span))
    )
    return request.resource_spans[0].scope_spans[0].spans[0]


def value_of(value: object) -> Message:
    return read_span({"attributes": [{"key": "k", "value": value}]}).attributes[0].value


TRACE_ID, SPAN_ID = "5B8EFFF798038103D269B633813FC60C", "EEE19B7EC3C1B174"


def test_ids_are_hexadecimal_in_either_case_wherever_they_stand() -> None:
    ids = {"traceId": TRACE_ID, "spanId": SPAN_ID.lower()}
    span = read_span({**ids, "parentSpanId": SPAN_ID, "links": [ids]})
    trace_id, span_id = bytes.fromhex(TRACE_ID), bytes.fromhex(SPAN_ID)
    assert (span.trace_id, span.span_id, span.parent_span_id) == (trace_id, span_id, span_id)
    assert (span.links[0].trace_id, span.links[0].span_id) == (trace_id, span_id)
    record = {"resourceLogs": [{"scopeLogs": [{"logRecords": [ids]}]}]}
    logs = ExportLogsServiceRequest.FromString(
        to_protobuf(ExportLogsServiceRequest, json.dumps(record).encode())
    )
    found = logs.resource_logs[0].scope_logs[0].log_records[0]
    assert (found.trace_id, found.span_id) == (trace_id, span_id)
    metric = {"gauge": {"dataPoints": [{"exemplars": [ids]}]}}
    sent = {"resourceMetrics": [{"scopeMetrics": [{"metrics": [metric]}]}]}
    metrics = ExportMetricsServiceRequest.FromString(
        to_protobuf(ExportMetricsServiceRequest, json.dumps(sent).encode())
    )
    points = metrics.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points
    assert (points[0].exemplars[0].trace_id, points[0].exemplars[0].span_id) == (trace_id, span_id)


@pytest.mark.parametrize(
    "wrong",
    ["W47/95gDgQPSabYzgT/GDA==", "abc", "zz" * 16, TRACE_ID + " ", [1, 2], 7, True, {"a": 1}],
)
def test_an_id_that_is_none_never_becomes_one(wrong: object) -> None:
    span = read_span({"traceId": wrong, "spanId": wrong, "name": "kept"})
    assert len(span.trace_id) not in (0, 16) and len(span.span_id) not in (0, 8)
    assert span.name == "kept"


def test_a_short_id_stays_short_and_an_empty_one_empty() -> None:
    span = read_span({"traceId": "ab", "spanId": "", "parentSpanId": None})
    assert (span.trace_id, span.span_id, span.parent_span_id) == (b"\xab", b"", b"")


@pytest.mark.parametrize(
    ("value", "kind", "meant"),
    [
        ({"stringValue": ""}, "string_value", ""),
        ({"stringValue": "é" * 100}, "string_value", "é" * 100),
        ({"intValue": "-9223372036854775808"}, "int_value", -(2**63)),
        ({"intValue": "9223372036854775807"}, "int_value", 2**63 - 1),
        ({"intValue": 7}, "int_value", 7),
        ({"intValue": "007"}, "int_value", 7),
        ({"intValue": 1e3}, "int_value", 1000),
        ({"intValue": "0"}, "int_value", 0),
        ({"doubleValue": "Infinity"}, "double_value", float("inf")),
        ({"doubleValue": "-Infinity"}, "double_value", -float("inf")),
        ({"doubleValue": "-1.5e-3"}, "double_value", -0.0015),
        ({"doubleValue": 3}, "double_value", 3.0),
        ({"boolValue": False}, "bool_value", False),
        ({"bytesValue": "-_8="}, "bytes_value", b"\xfb\xff"),
        ({"bytesValue": "+/8"}, "bytes_value", b"\xfb\xff"),
        ({"bytesValue": ""}, "bytes_value", b""),
        ({}, None, None),
        ({"stringValue": None}, None, None),
        ({"string_value": "snake"}, None, None),
        ({"newValue": {"a": [1]}, "intValue": "1"}, "int_value", 1),
    ],
)
def test_values_are_read_as_proto3_says(value: object, kind: str | None, meant: object) -> None:
    found = value_of(value)
    assert found.WhichOneof("value") == kind
    assert kind is None or getattr(found, kind) == meant


def test_unknown_fields_are_ignored_and_null_is_absent_at_every_level() -> None:
    sent = {"name": "n", "events": None, "status": None, "kind": None, "newThing": [{}, None, 1]}
    assert read_span({**sent, "name_": 1}) == read_span({"name": "n"})
    assert value_of({"arrayValue": {"values": [None, {}]}}).array_value.values == [
        value_of({}),
        value_of({}),
    ]


SPAN = "resourceSpans[0].scopeSpans[0].spans[0]"
VALUE = f"{SPAN}.attributes[0].value"
INT64 = "an integer from -9223372036854775808 to 9223372036854775807"
FIXED64 = "an integer from 0 to 18446744073709551615"
UINT32 = "an integer from 0 to 4294967295"


@pytest.mark.parametrize(
    ("span", "path", "wanted"),
    [
        ({"kind": "SPAN_KIND_SERVER"}, "kind", "an enum's value as an integer, not its name"),
        ({"kind": "2"}, "kind", "an enum's value as an integer, not its name"),
        ({"status": {"code": True}}, "status.code", "an enum's value as an integer, not its name"),
        ({"startTimeUnixNano": "1e9"}, "startTimeUnixNano", FIXED64),
        ({"startTimeUnixNano": -1}, "startTimeUnixNano", FIXED64),
        ({"startTimeUnixNano": "18446744073709551616"}, "startTimeUnixNano", FIXED64),
        ({"startTimeUnixNano": 1.5}, "startTimeUnixNano", FIXED64),
        ({"startTimeUnixNano": True}, "startTimeUnixNano", FIXED64),
        ({"startTimeUnixNano": "٣"}, "startTimeUnixNano", FIXED64),
        ({"startTimeUnixNano": "1_0"}, "startTimeUnixNano", FIXED64),
        ({"flags": 2**32}, "flags", UINT32),
        ({"name": 5}, "name", "a string"),
        ({"name": ["a"]}, "name", "a string"),
        ({"events": {}}, "events", "a list"),
        ({"events": [{}, {"name": 1}]}, "events[1].name", "a string"),
        ({"events": [{}, 7]}, "events[1]", "an object"),
        ({"status": []}, "status", "an object"),
    ],
)
def test_a_misfit_is_refused_with_its_path(span: object, path: str, wanted: str) -> None:
    assert_refused(span_json(span), f"{SPAN}.{path}", wanted)


@pytest.mark.parametrize(
    ("value", "field", "wanted"),
    [
        ({"intValue": "1.5"}, "intValue", INT64),
        ({"intValue": ""}, "intValue", INT64),
        ({"intValue": "9" * 19}, "intValue", INT64),
        ({"intValue": "9" * 5000}, "intValue", INT64),
        ({"intValue": "²"}, "intValue", INT64),
        ({"doubleValue": "nan"}, "doubleValue", 'a number, "NaN", "Infinity" or "-Infinity"'),
        ({"doubleValue": "0x1"}, "doubleValue", 'a number, "NaN", "Infinity" or "-Infinity"'),
        ({"doubleValue": False}, "doubleValue", 'a number, "NaN", "Infinity" or "-Infinity"'),
        ({"boolValue": 1}, "boolValue", "true or false"),
        ({"boolValue": "true"}, "boolValue", "true or false"),
        ({"bytesValue": "a"}, "bytesValue", "bytes in base64"),
        ({"bytesValue": "é"}, "bytesValue", "bytes in base64"),
        ({"bytesValue": [1]}, "bytesValue", "bytes in base64"),
        ({"stringValue": 1}, "stringValue", "a string"),
        ({"arrayValue": {"values": [{"intValue": {}}]}}, "arrayValue.values[0].intValue", INT64),
    ],
)
def test_a_misfit_in_an_attribute_too(value: object, field: str, wanted: str) -> None:
    body = span_json({"attributes": [{"key": "k", "value": value}]})
    for _ in range(2):  # the second time, the key is known
        assert_refused(body, f"{VALUE}.{field}", wanted)


def assert_refused(body: bytes, path: str, wanted: str) -> None:
    with pytest.raises(UnreadableJsonError) as caught:
        to_protobuf(ExportTraceServiceRequest, body)
    assert (caught.value.field, caught.value.message) == (path, f"{path} must be {wanted}")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not JSON in UTF-8, at line 1, column 1"),
        (b'{"resourceSpans": [}', "not JSON in UTF-8, at line 1, column 20"),
        (b'{"a": "\xff"}', "not JSON in UTF-8, at line 1, column 1"),
        (rb'{"a": "\ud800"}', "not JSON in UTF-8, at line 1, column 8"),
        (b'{"a": NaN}', "not JSON in UTF-8, at line 1, column 7"),
        (b"[]", "body must be an object"),
        (b"null", "body must be an object"),
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(UnreadableJsonError) as caught:
        to_protobuf(ExportTraceServiceRequest, body)
    assert caught.value.field == "body"
    assert caught.value.message.partition(", column")[0] == message.partition(", column")[0]


def nested(levels: int, wrap: Callable[[object], object]) -> bytes:
    value: object = {"stringValue": "deep"}
    for _ in range(levels):
        value = wrap(value)
    return span_json({"attributes": [{"key": "k", "value": value}]})


def test_values_nest_as_deeply_as_protobuf_reads_them_and_no_deeper() -> None:
    def array(value: object) -> object:
        return {"arrayValue": {"values": [value]}}

    fits = to_protobuf(ExportTraceServiceRequest, nested(47, array))
    assert ExportTraceServiceRequest.FromString(fits).ByteSize() == len(fits)
    for levels in (48, 150, 300):
        with pytest.raises(UnreadableJsonError, match="nested less deeply: at most 100 messages"):
            to_protobuf(ExportTraceServiceRequest, nested(levels, array))


@pytest.mark.parametrize("opening", [b'{"a":', b"[", b'{"resourceSpans":['])
def test_bottomless_json_is_refused(opening: bytes) -> None:
    with pytest.raises(UnreadableJsonError):
        to_protobuf(ExportTraceServiceRequest, opening * 100_000)


def test_more_values_than_are_held_at_once_are_refused_before_they_are_read() -> None:
    body = b'{"a":[' + b"{}," * (MOST_VALUES // 2) + b"{}]}"
    with pytest.raises(TooManyValuesError):
        to_protobuf(ExportTraceServiceRequest, body)


names = st.sampled_from(
    ["resourceSpans", "scopeSpans", "spans", "attributes", "key", "value", "stringValue"]
    + ["intValue", "arrayValue", "values", "kvlistValue", "traceId", "kind", "status", "x"]
)
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=400, deadline=None)
@given(any_json.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=40))
def test_any_bytes_become_a_request_or_are_refused(body: bytes) -> None:
    try:
        read = to_protobuf(ExportTraceServiceRequest, body)
    except UnreadableJsonError as error:
        assert error.message.endswith(("column 1", "an object")) or error.field
    else:
        ExportTraceServiceRequest.FromString(read)
