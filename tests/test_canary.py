"""Content sent through every way in is nowhere on disk, at any moment, nor in what is printed."""

import gzip
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from conftest import Collector
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    Exemplar,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
    Summary,
    SummaryDataPoint,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status
from otlp_client import PROTOBUF, call, post, wait_until
from otlp_json_text import as_json
from otlp_messages import any_value, key_values

from perfledger.collectors.otlp_rows import SIGNALS, Signal

Start = Callable[..., AbstractContextManager[Collector]]
CANARY, KEPT = "canary-8e41f7", "kept-1b7c20"
TRACES, METRICS, LOGS = SIGNALS
# An unknown field 1023 of each wire type, and a group; and 8 bytes of it as a number.
_PIECE = bytes([len(CANARY)]) + CANARY.encode()
UNKNOWN = b"\xfa\x3f" + _PIECE + b"\xf9\x3f" + CANARY.encode()[:8]
UNKNOWN_GROUP = b"\xfb\x3f\x0a" + _PIECE + b"\xfc\x3f"


def content() -> list[KeyValue]:
    """Return attributes that hold the canary under denied keys at every depth; two are kept."""
    deep: object = {"prompt": CANARY, "kept": KEPT}
    for _ in range(12):
        deep = {"level": [deep]}
    bottomless: object = {"prompt": CANARY}
    for _ in range(40):
        bottomless = [bottomless]
    return key_values(
        {
            "gen_ai.prompt": CANARY,
            "gen_ai.completion.0.content": CANARY,
            "GEN_AI.Input.Messages": [{"role": "user", "parts": [CANARY]}],
            "messages": {"a": CANARY},
            "exception.message": CANARY.encode(),
            "http.request.body": CANARY,
            "outer": {"gen_ai": {"prompt": CANARY}, "kept": KEPT, "llm": {"prompts": [CANARY]}},
            "deep": deep,
            "bottomless": bottomless,
            "kept": KEPT,
        }
    )


def with_unknown(message: Message, tail: bytes) -> Message:
    """Return a message with fields that OTLP does not have behind the others, at every level."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE:
            for element in value if field.is_repeated else [value]:
                with_unknown(element, tail)
    message.MergeFromString(tail)
    return message


def traces(way: int) -> ExportTraceServiceRequest:
    """Return spans: a good one, its duplicate with more attributes, and one that is rejected."""
    now_ns = time.time_ns()

    def span(trace_id: bytes, number: int, **more: object) -> Span:
        return Span(
            trace_id=trace_id,
            span_id=(1000 * way + number).to_bytes(8, "big"),
            name=f"{KEPT}-span",
            start_time_unix_nano=now_ns,
            end_time_unix_nano=now_ns + 5,
            attributes=content(),
            events=[Span.Event(name="exception", time_unix_nano=now_ns, attributes=content())],
            links=[Span.Link(trace_id=b"l" * 16, span_id=b"l" * 8, attributes=content())],
            status=Status(code=2, message=f"ValueError: {CANARY}"),
            **more,
        )

    spans = [span(b"t" * 16, 1), span(b"t" * 16, 1, trace_state=KEPT), span(b"short", 2)]
    scope = InstrumentationScope(name="s", attributes=content())
    return ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=Resource(attributes=content()),
                scope_spans=[ScopeSpans(scope=scope, spans=spans)],
            )
        ]
    )


def metrics(way: int) -> ExportMetricsServiceRequest:
    exemplars = [Exemplar(filtered_attributes=content(), as_int=1)]
    shared = {"attributes": content(), "time_unix_nano": time.time_ns()}
    number = NumberDataPoint(as_int=way, exemplars=exemplars, **shared)
    histogram = HistogramDataPoint(exemplars=exemplars, **shared)
    exponential = ExponentialHistogramDataPoint(exemplars=exemplars, **shared)
    made = [
        Metric(name=f"{KEPT}-gauge", metadata=content(), gauge=Gauge(data_points=[number])),
        Metric(name="sum", metadata=content(), sum=Sum(data_points=[number])),
        Metric(name="histogram", histogram=Histogram(data_points=[histogram])),
        Metric(
            name="exponential",
            exponential_histogram=ExponentialHistogram(data_points=[exponential]),
        ),
        Metric(name="summary", summary=Summary(data_points=[SummaryDataPoint(**shared)])),
        Metric(name="", metadata=content(), gauge=Gauge(data_points=[number])),
    ]
    scope = InstrumentationScope(name="s", attributes=content())
    return ExportMetricsServiceRequest(
        resource_metrics=[
            ResourceMetrics(
                resource=Resource(attributes=content()),
                scope_metrics=[ScopeMetrics(scope=scope, metrics=made)],
            )
        ]
    )


def logs(way: int) -> ExportLogsServiceRequest:
    body = any_value({"anything": CANARY, "list": [CANARY]})
    records = [
        LogRecord(body=body, attributes=content(), event_name=f"{KEPT}-event"),
        LogRecord(body=any_value(CANARY), attributes=content(), event_name="gen_ai.user.message"),
    ]
    for record in records:
        record.time_unix_nano, record.trace_id = time.time_ns(), way.to_bytes(16, "big")
    scope = InstrumentationScope(name="s", attributes=content())
    return ExportLogsServiceRequest(
        resource_logs=[
            ResourceLogs(
                resource=Resource(attributes=content()),
                scope_logs=[ScopeLogs(scope=scope, log_records=records)],
            )
        ]
    )


MAKERS = ((TRACES, traces), (METRICS, metrics), (LOGS, logs))


def send_everything(collector: Collector) -> None:
    """Send each signal by gRPC and HTTP, protobuf and JSON, plain and compressed."""
    ways = 0
    for signal, make in MAKERS:
        for tail in (b"", UNKNOWN, UNKNOWN + UNKNOWN_GROUP):
            ways += 1
            body = with_unknown(make(ways), tail).SerializeToString()
            assert CANARY.encode() in body
            call(collector.grpc_port, body, signal.grpc_service, gzipped=ways % 2 == 0)
            answer = post(collector.http_port, body, path=signal.path)
            assert answer[0] == 200
            zipped = {**PROTOBUF, "Content-Encoding": "gzip"}
            answer = post(collector.http_port, gzip.compress(body), zipped, signal.path)
            assert answer[0] == 200
            send_json(collector, signal, make(ways + 100))


def send_json(collector: Collector, signal: Signal, message: Message) -> None:
    json_type = {"Content-Type": "application/json"}
    unknown = f'{{"unknownField": {{"prompt": "{CANARY}"}}, '
    body = as_json(message).replace("{", unknown).encode()
    assert post(collector.http_port, body, json_type, signal.path)[0] == 200
    # What cannot be read must not be quoted in any log.
    assert post(collector.http_port, body[:-3], json_type, signal.path)[0] == 400
    assert post(collector.http_port, b"\xff" + body, path=signal.path)[0] == 400
    assert post(collector.http_port, body, {"Content-Type": f"text/{CANARY}"})[0] == 415
    assert post(collector.http_port, body, json_type, f"/v1/{CANARY}")[0] == 404


def texts_on_disk(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield everything below a folder: names, bytes, Parquet's values and metadata as text."""
    for path in sorted(folder.rglob("*")):
        yield path, str(path.relative_to(folder)).encode()
        if not path.is_file():
            continue
        yield path, path.read_bytes()
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            yield path, repr(table.to_pylist()).encode()
            yield path, repr(pq.read_metadata(path).to_dict()).encode()


def assert_clean(folder: Path) -> bytes:
    """Nothing below the folder holds the canary, or a piece of it. Returns all that was read."""
    everything = []
    for path, text in texts_on_disk(folder):
        assert not re.search(CANARY[:8].encode(), text, re.IGNORECASE), path
        everything.append(text)
    return b"".join(everything)


def tables_in(store: Path) -> set[str]:
    """Return the tables that have a file."""
    return {part for path in store.rglob("*.parquet") for part in path.parts}


@pytest.mark.timeout(180)
def test_content_is_nowhere_before_and_after_files_are_written(
    tmp_path: Path, start_collector: Start
) -> None:
    with start_collector(tmp_path) as collector:
        send_everything(collector)
        collector.process.kill()
        collector.process.wait()
    found = assert_clean(tmp_path)
    assert KEPT.encode() in found
    with start_collector(tmp_path) as collector:
        wait_until(lambda: {s.table for s in SIGNALS} <= tables_in(collector.store), 60)
        send_everything(collector)
        time.sleep(0.3)
        assert_clean(tmp_path)
        collector.process.kill()
        collector.process.wait()
    assert_clean(tmp_path)
    with start_collector(tmp_path):
        pass
    found = assert_clean(tmp_path)
    for kept in ("span", "gauge", "event"):
        assert f"{KEPT}-{kept}".encode() in found
