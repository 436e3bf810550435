"""Content sent to the collector is found nowhere: not on disk, not in its output."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
    KeyValueList,
)
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    Exemplar,
    Gauge,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2
from otlp_client import TRACE_SERVICE, call, post, printed_counts, span, text

from perfledger.collectors.attribute_values import MOST_ELEMENTS_OF_ALL_LEVELS, AttributeReader
from perfledger.collectors.content import is_denied_within
from perfledger.collectors.content_removal import is_clean_value, remove_content
from perfledger.collectors.lenient_messages import KEY_VALUE, TRACES_REQUEST
from perfledger.schema.attributes import CONTENT_KEYS, HARMLESS_KEYS, is_content

CANARY = "canary-5c1d9e"
CONTROL = "control-77ab20"
Start = Callable[..., AbstractContextManager[object]]


def canaries(way: str) -> dict[str, bytes]:
    """Return a request a signal, with content under content keys in every place there is."""
    secret = AnyValue(string_value=f"{CANARY}-{way}")
    nested = AnyValue(
        kvlist_value=KeyValueList(
            values=[
                KeyValue(key="messages", value=secret),
                KeyValue(
                    key="gen_ai",
                    value=AnyValue(
                        kvlist_value=KeyValueList(values=[KeyValue(key="prompt", value=secret)])
                    ),
                ),
                text("control", CONTROL),
            ]
        )
    )
    content = [
        KeyValue(key="gen_ai.input.messages", value=secret),
        KeyValue(key="gen_ai.prompt.0.content", value=secret),
        KeyValue(
            key="llm.output_messages", value=AnyValue(array_value=ArrayValue(values=[secret]))
        ),
        KeyValue(key="exception.message", value=secret),
        KeyValue(key="harmless", value=nested),
    ]
    resource, scope = Resource(attributes=content), InstrumentationScope(attributes=content)
    canary_span = span(
        abs(hash(way)) % 2**60 + 1,
        attributes=content,
        events=[trace_pb2.Span.Event(name="exception", attributes=content)],
        links=[trace_pb2.Span.Link(attributes=content)],
        status=trace_pb2.Status(code=2, message=f"Error: {CANARY}-{way}"),
    )
    point = NumberDataPoint(
        as_int=1, attributes=content, exemplars=[Exemplar(filtered_attributes=content, as_int=1)]
    )
    record = LogRecord(body=secret, attributes=content, trace_id=bytes(range(16)))
    return {
        "traces": ExportTraceServiceRequest(
            resource_spans=[
                trace_pb2.ResourceSpans(
                    resource=resource,
                    scope_spans=[trace_pb2.ScopeSpans(scope=scope, spans=[canary_span])],
                )
            ]
        ).SerializeToString(),
        "metrics": ExportMetricsServiceRequest(
            resource_metrics=[
                ResourceMetrics(
                    resource=resource,
                    scope_metrics=[
                        ScopeMetrics(
                            scope=scope,
                            metrics=[Metric(name="m", gauge=Gauge(data_points=[point]))],
                        )
                    ],
                )
            ]
        ).SerializeToString(),
        "logs": ExportLogsServiceRequest(
            resource_logs=[
                ResourceLogs(
                    resource=resource,
                    scope_logs=[ScopeLogs(scope=scope, log_records=[record])],
                )
            ]
        ).SerializeToString(),
    }


SERVICES = {
    "traces": TRACE_SERVICE,
    "metrics": "opentelemetry.proto.collector.metrics.v1.MetricsService",
    "logs": "opentelemetry.proto.collector.logs.v1.LogsService",
}


def test_a_canary_sent_through_every_way_in_is_found_nowhere(
    tmp_path: Path, start_collector: Start
) -> None:
    with start_collector(tmp_path) as collector:
        for name, body in canaries("http").items():
            assert post(collector.http_port, body, path=f"/v1/{name}")[0] == 200
            damaged = body + b"\xff"
            assert post(collector.http_port, damaged, path=f"/v1/{name}")[0] == 400
        for name, body in canaries("grpc").items():
            call(collector.grpc_port, body, SERVICES[name])
            with pytest.raises(grpc.RpcError):
                call(collector.grpc_port, body + b"\xff", SERVICES[name])
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    shown = {path: path.read_bytes() for path in files}
    for path in files:
        if path.suffix == ".parquet":  # compressed: search what it says, too
            shown[path] += str(pq.read_table(path, partitioning=None).to_pylist()).encode()
    assert [path for path, content in shown.items() if CANARY.encode() in content] == []
    with_control = {path.parent.parent.name for path, c in shown.items() if CONTROL.encode() in c}
    assert with_control == {"spans", "points", "logs"}
    assert {name: count[1] for name, count in printed_counts(collector.log).items()} == {
        "spans": 2,
        "points": 2,
        "logs": 2,
    }


# --- Content by the names of its parents ----------------------------------------------------------


@st.composite
def parts_of_keys(draw: st.DrawFn) -> list[str]:
    """Return one known key as nested keys, with something before, between or behind at times."""
    known = draw(st.sampled_from(sorted(CONTENT_KEYS | HARMLESS_KEYS)))
    parts = [known]
    while "." in parts[-1] and draw(st.booleans()):
        parts[-1:] = parts[-1].split(".", draw(st.integers(1, 2)))
    if draw(st.integers(0, 3)) == 0:
        parts = [part.upper() for part in parts]
    if draw(st.integers(0, 3)) == 0:
        parts[-1] += draw(st.sampled_from([".", ".0.x", "x", ".x" * 20, "x" * 40, ".size"]))
    return parts


SHORT = st.text("a.İΣ", max_size=3) | st.sampled_from(["gen_ai", "http.request", "size", "k" * 50])
PATHS = st.lists(parts_of_keys() | st.lists(SHORT, max_size=4), max_size=4)


@settings(max_examples=1000, deadline=None)
@given(PATHS)
def test_a_nested_key_is_denied_where_any_join_with_its_parents_is_content(
    keys: list[list[str]],
) -> None:
    path: list[str] = []
    for key in (part for parts in keys for part in parts):
        whole = [*path, key]
        expected = any(is_content(".".join(whole[start:])) for start in range(len(whole)))
        assert is_denied_within(path, key) is expected, (path, key)
        if not expected:
            path.append(key)


def varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def field(tag: int, content: bytes) -> bytes:
    return bytes([tag]) + varint(len(content)) + content


def elements_below(value: object) -> int:
    """Return how many elements an AnyValue has at all levels."""
    kvlist = value.kvlist_value.values  # type: ignore[attr-defined]
    array = value.array_value.values  # type: ignore[attr-defined]
    inner = (elements_below(KEY_VALUE.FromString(element).value) for element in kvlist)  # type: ignore[attr-defined]
    return len(kvlist) + len(array) + sum(inner)


SECRET = field(0x0A, field(0x0A, b"input") + field(0x12, field(0x0A, b"secret")))
LEAF = field(0x0A, b"\x0a\1k")
BROKEN_ELEMENTS = b"\x0a\1\xff" * 3000
MANY = {
    "at all levels": (
        [field(0x32, LEAF * 9_999)] * 13,
        MOST_ELEMENTS_OF_ALL_LEVELS,
    ),
    "at one level": ([b""] * 12_000, 10_000),
    "content before one that may stay": ([field(0x32, SECRET * 9_990 + LEAF * 20)], 11),
    "damaged before one that may stay": ([field(0x2A, BROKEN_ELEMENTS + b"\x0a\2\x18\1")], 3002),
}


@pytest.mark.parametrize(("values", "left"), MANY.values(), ids=MANY)
def test_of_a_huge_value_a_part_is_left_that_reads_the_same(values: list[bytes], left: int) -> None:
    inner = (field(0x0A, b"%05d" % i) + field(0x12, value) for i, value in enumerate(values))
    whole = field(0x32, b"".join(field(0x0A, element) for element in inner))
    attribute = field(0x0A, b"info") + field(0x12, whole)
    body = field(0x0A, field(0x12, field(0x12, field(0x4A, attribute))))
    message = TRACES_REQUEST.FromString(body)
    removed = remove_content(message)
    assert removed == attribute.count(b"secret")
    kept = message.resource_spans[0].scope_spans[0].spans[0].attributes[0]  # type: ignore[attr-defined]
    assert b"secret" not in kept.SerializeToString()
    assert elements_below(kept.value) == left
    assert is_clean_value(kept)
    assert not is_clean_value(KEY_VALUE.FromString(attribute))
    for limit in (64, 2048, 100_000_000):
        sent, again = (
            AttributeReader(limit).value(value, "info")
            for value in (KEY_VALUE.FromString(attribute), kept)
        )
        assert sent == again
