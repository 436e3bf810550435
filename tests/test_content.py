"""Content sent to the collector is found nowhere: not on disk, not in its output."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import pyarrow.parquet as pq
import pytest
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
