"""What the collector's tests send and how they look at the answer: raw OTLP, no SDK."""

import http.client
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import polars as pl
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

from perfledger.schema.store import Store

TRACE_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
PROTOBUF = {"Content-Type": "application/x-protobuf"}


def text(key: str, value: str) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(string_value=value))


def number(key: str, value: int) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(int_value=value))


def span(span_id: int, trace_id: int = 1, **fields: object) -> trace_pb2.Span:
    now_ns = time.time_ns()
    defaults: dict[str, object] = {
        "name": "work",
        "start_time_unix_nano": now_ns - 1000,
        "end_time_unix_nano": now_ns,
    }
    return trace_pb2.Span(
        trace_id=trace_id.to_bytes(16, "big"),
        span_id=span_id.to_bytes(8, "big"),
        **{**defaults, **fields},
    )


def traces(*spans: trace_pb2.Span, service: str = "svc") -> bytes:
    scoped = trace_pb2.ScopeSpans(spans=spans)
    resource = Resource(attributes=[text("service.name", service)])
    group = trace_pb2.ResourceSpans(resource=resource, scope_spans=[scoped])
    return ExportTraceServiceRequest(resource_spans=[group]).SerializeToString()


def post(
    port: int,
    body: bytes,
    headers: dict[str, str] | None = None,
    path: str = "/v1/traces",
    method: str = "POST",
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, PROTOBUF if headers is None else headers)
        answer = connection.getresponse()
        return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def call(port: int, body: bytes, service: str = TRACE_SERVICE, gzipped: bool = False) -> bytes:
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        compression = grpc.Compression.Gzip if gzipped else grpc.Compression.NoCompression
        return channel.unary_unary(f"/{service}/Export")(body, timeout=30, compression=compression)


def stored(folder: Path, table: str) -> pl.DataFrame:
    return Store.at(str(folder)).scan(table).collect()


def grpc_refusal(error: grpc.RpcError) -> tuple[grpc.StatusCode, list[str], float | None]:
    """Return the code, the kinds of its details, and the delay that Python's exporter reads."""
    trailers = dict(error.trailing_metadata())
    status = Status.FromString(trailers.get("grpc-status-details-bin", b""))
    retry = trailers.get("google.rpc.retryinfo-bin")
    delay = RetryInfo.FromString(retry).retry_delay if retry else None
    kinds = [detail.type_url.rpartition(".")[2] for detail in status.details]
    return error.code(), kinds, None if delay is None else delay.seconds + delay.nanos / 1e9


def printed_counts(log: Path) -> dict[str, list[int]]:
    """Read received, written, rejected, waiting of the table that a collector prints last."""
    counts = {}
    for line in log.read_text().splitlines():
        name, *cells = line.split() or [""]
        if name in ("spans", "points", "logs") and len(cells) == 6:
            counts[name] = [int(cell.replace(",", "")) for cell in cells[:4]]
    return counts


def wait_until(ready: Callable[[], bool], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.1)
