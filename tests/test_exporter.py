"""The exporter process: real shared memory, a real socket, real OTLP servers over gRPC and HTTP."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from perfledger.instrumented_runtime import exporter, otlp
from perfledger.instrumented_runtime.finished_spans import FinishedSpan
from perfledger.instrumented_runtime.records import (
    KINDS,
    Admit,
    Chunk,
    Leave,
    Record,
    Step,
)
from perfledger.instrumented_runtime.ring import Counts, Ring, Writer, to_signed
from perfledger.instrumented_runtime.telemetry import (
    EngineRecord,
    RankRing,
    RequestRecord,
    SpanRecord,
    TelemetrySender,
    open_channel,
)
from perfledger.schema.clocks import ClockAnchor

ANCHOR = ClockAnchor(1_000, 1_700_000_000_000_000_000, "boot-7")
RESOURCE: dict[str, str | int] = {
    "service.name": "perfledger-runtime",
    "service.instance.id": "instance-1",
    "perfledger.run.id": "run-1",
}
TRACE_ID, ROOT_ID, CALLER_ID = 0xF1 << 120 | 5, 0xF2 << 56 | 6, 0xF3 << 56 | 7
KIND_OF: dict[type, int] = {fields: kind for kind, fields in KINDS.items()}
END_S = 30.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(ready: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


@dataclass
class Collector:
    """What an OTLP server got, and where it listens."""

    port: int
    traces: list[trace_service_pb2.ExportTraceServiceRequest] = field(default_factory=list)
    metrics: list[metrics_service_pb2.ExportMetricsServiceRequest] = field(default_factory=list)
    headers: set[tuple[str, str]] = field(default_factory=set)

    def resource_spans(self) -> list[ResourceSpans]:
        return [group for request in list(self.traces) for group in request.resource_spans]

    def spans(self) -> list[Span]:
        scopes = [scope for group in self.resource_spans() for scope in group.scope_spans]
        return [span for scope in scopes for span in scope.spans]

    def points(self) -> dict[str, dict[str, float]]:
        """Return the last value of each metric, by the value of its attribute."""
        found: dict[str, dict[str, float]] = {}
        for request in self.metrics:
            for metric in request.resource_metrics[0].scope_metrics[0].metrics:
                for point in (metric.sum if metric.HasField("sum") else metric.gauge).data_points:
                    by = [attribute.value.string_value for attribute in point.attributes]
                    found.setdefault(metric.name, {})[by[0] if by else ""] = point.as_int
        return found


@contextmanager
def grpc_collector(port: int, answers: Callable[[], None] = lambda: None) -> Iterator[Collector]:
    collector = Collector(port)

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: Any) -> Message:
            answers()
            collector.headers.update(context.invocation_metadata())
            collector.traces.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Message:
            answers()
            collector.metrics.append(request)
            return metrics_service_pb2.ExportMetricsServiceResponse()

    server = grpc.server(futures.ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    assert server.add_insecure_port(f"127.0.0.1:{port}") == port
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


@contextmanager
def http_collector(port: int) -> Iterator[Collector]:
    collector = Collector(port)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.headers.update((name.lower(), value) for name, value in self.headers.items())
            if self.path == "/v1/traces":
                collector.traces.append(
                    trace_service_pb2.ExportTraceServiceRequest.FromString(body)
                )
            elif self.path == "/v1/metrics":
                collector.metrics.append(
                    metrics_service_pb2.ExportMetricsServiceRequest.FromString(body)
                )
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


COLLECTORS = {"grpc": grpc_collector, "http/protobuf": http_collector}


class Running:
    """An exporter process with both of its inputs."""

    def __init__(self, slots: int = 4096) -> None:
        self.ring = Ring.create(slots)
        near, far = open_channel()
        self.writer = Writer.attach(self.ring.name)
        self.sender = TelemetrySender(near)
        self.process = multiprocessing.get_context("spawn").Process(
            target=exporter.main, args=([RankRing(self.ring.name)], far, ANCHOR, RESOURCE)
        )
        self.process.start()
        far.close()

    def write(self, *records: Record) -> None:
        for record in records:
            self.writer.write(KIND_OF[type(record)], record)

    def stop(self) -> Counts:
        """Close the channel; return the last counts once the process has ended."""
        self.sender.close()
        self.process.join(END_S)
        ended = self.process.exitcode is not None
        self.process.kill()
        self.process.join()
        assert ended, "the exporter did not end"
        counts = self.ring.counts()
        self.ring.close()
        return counts


def point_at(monkeypatch: pytest.MonkeyPatch, port: int, protocol: str = "grpc") -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)


# --- the whole way ---

SCRIPT: tuple[Record, ...] = (
    Admit(
        3, 1, to_signed(TRACE_ID >> 64), TRACE_ID & (1 << 64) - 1, to_signed(ROOT_ID),
        1_200, 1_300, 1_310, 5, 0, 0, 0, 0,
    ),
    Chunk(3, 1, 5, 0, 1, 1, 1),
    Step(1, 1_290, 1_320, 1_400, 1_410, 1_420, 1, 5, 0, 0, 1, 9, 33),
    Step(2, 1_500, 1_510, 1_600, 1_610, 1_620, 1, 0, 1, 2, 1, 9, 44),
    Leave(3, 2, 1_625, 0, 2, 5, 0, 1, 0, 0, 0, 0),
)  # fmt: skip
ENGINE = EngineRecord({"perfledger.device": "cpu", "perfledger.dtype": "float32"})
REQUEST = RequestRecord(
    request=3,
    trace_id=TRACE_ID,
    span_id=ROOT_ID,
    parent_span_id=CALLER_ID,
    name="chat",
    start_ns=1_100,
    end_ns=1_900,
    outcome="error",
    attributes={
        "error.type": "timeout",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ["stop"],
    },
    spans=[SpanRecord("tokenize", 1_120, 1_180, {})],
    sent_ns=1_200,
)

View = tuple[str, str, str, int, int, dict[str, object]]


def wall(monotonic_ns: int) -> int:
    return monotonic_ns - 1_000 + 1_700_000_000_000_000_000


def plain(value: AnyValue) -> object:
    if value.HasField("array_value"):
        return [plain(one) for one in value.array_value.values]
    return getattr(value, str(value.WhichOneof("value")))


def attributes(pairs: Sequence[KeyValue]) -> dict[str, object]:
    return {pair.key: plain(pair.value) for pair in pairs}


def views(spans: list[Span]) -> list[View]:
    """Return (trace, name, parent, start, end, attributes), in the order of starts."""
    names = {span.span_id: span.name for span in spans}
    own = TRACE_ID.to_bytes(16, "big")
    views = [
        (
            "request" if span.trace_id == own else "engine",
            span.name,
            names.get(span.parent_span_id, span.parent_span_id.hex()),
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            attributes(span.attributes),
        )
        for span in spans
    ]
    return sorted(views, key=lambda view: (view[3], -view[4], view[0]))


def expected_views() -> list[View]:
    cached: dict[str, object] = {"gen_ai.usage.cache_read.input_tokens": 0}
    engine = {
        "perfledger.replica": "0",
        "perfledger.rank": 0,
        "perfledger.device": "cpu",
        "perfledger.dtype": "float32",
        "perfledger.step.width": 1,
        "perfledger.step.kv_blocks_used": 1,
        "perfledger.step.kv_blocks_total": 9,
    }

    def step(seq: int, prefill: int, decode: int, waiting: int, cpu_ns: int) -> dict[str, object]:
        return engine | {
            "perfledger.step.seq": seq,
            "perfledger.step.prefill_tokens": prefill,
            "perfledger.step.decode_tokens": decode,
            "perfledger.step.waiting": waiting,
            "perfledger.step.cpu_ns": cpu_ns,
        }

    root = dict(REQUEST.attributes) | {"perfledger.status": "error"} | cached
    root |= {"perfledger.kv_blocks_held": 1, "perfledger.computed_tokens": 5}
    of_step = {"perfledger.step.seq": 1}
    left = {"perfledger.reason": "stop", "perfledger.tokens": 1}
    rows: list[tuple[str, str, str, int, int, dict[str, object]]] = [
        ("request", "chat", f"{CALLER_ID:016x}", 1_100, 1_900, root),
        ("request", "tokenize", "chat", 1_120, 1_180, {}),
        ("request", "queue", "chat", 1_200, 1_300, {"perfledger.reason": "admission"}),
        ("engine", "prefill_step", "", 1_290, 1_420, step(1, 5, 0, 0, 33)),
        ("engine", "schedule", "prefill_step", 1_290, 1_320, {}),
        ("request", "context", "chat", 1_300, 1_310, cached),
        ("engine", "forward", "prefill_step", 1_320, 1_400, {}),
        ("request", "prefill", "chat", 1_320, 1_400, {"perfledger.tokens": 5} | of_step),
        ("engine", "sample", "prefill_step", 1_400, 1_410, {}),
        ("request", "sample", "chat", 1_400, 1_410, {"perfledger.tokens": 1} | of_step),
        ("request", "decode", "chat", 1_410, 1_625, left),
        ("engine", "decode_step", "", 1_500, 1_620, step(2, 0, 1, 2, 44)),
        ("engine", "schedule", "decode_step", 1_500, 1_510, {}),
        ("engine", "forward", "decode_step", 1_510, 1_600, {}),
        ("engine", "sample", "decode_step", 1_600, 1_610, {}),
    ]
    return [(*row[:3], wall(row[3]), wall(row[4]), row[5]) for row in rows]


@pytest.mark.parametrize("protocol", COLLECTORS)
def test_a_request_and_its_steps_arrive_whole(
    protocol: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with COLLECTORS[protocol](free_port()) as collector:
        point_at(monkeypatch, collector.port, protocol)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=ledger")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "named-by-environment")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        running = Running()
        running.sender.send(ENGINE)
        running.write(*SCRIPT)
        running.sender.send(REQUEST)
        assert running.stop() == Counts(0, 15, 0)
        assert running.process.exitcode == 0

    spans = collector.spans()
    assert views(spans) == expected_views()
    assert {span.name: span.kind for span in spans if span.kind != Span.SPAN_KIND_INTERNAL} == {
        "chat": Span.SPAN_KIND_SERVER
    }
    assert {span.name for span in spans if span.status.code == 2} == {"chat"}
    linked = [(s.name, link) for s in spans for link in s.links]
    assert [
        (name, link.trace_id, link.span_id, attributes(link.attributes)) for name, link in linked
    ] == [
        (name, TRACE_ID.to_bytes(16, "big"), ROOT_ID.to_bytes(8, "big"), told)
        for name, told in (
            ("prefill_step", {"perfledger.phase": "prefill", "perfledger.tokens": 5}),
            ("decode_step", {"perfledger.phase": "decode", "perfledger.tokens": 1}),
        )
    ]
    assert len({span.trace_id for span in spans}) == 2
    assert len({span.span_id for span in spans}) == 15
    [resource] = [attributes(group.resource.attributes) for group in collector.resource_spans()]
    sdk = {name: resource.pop(name) for name in list(resource) if name.startswith("telemetry.sdk")}
    assert len(sdk) == 3
    assert resource == RESOURCE | {
        "service.name": "named-by-environment",
        "deployment.environment.name": "test",
        "perfledger.clock.boot_id": "boot-7",
        "perfledger.clock.monotonic_ns": 1_000,
        "perfledger.clock.wall_ns": 1_700_000_000_000_000_000,
    }
    scopes = {
        (s.scope.name, s.scope.version) for g in collector.resource_spans() for s in g.scope_spans
    }
    assert scopes == {("perfledger.runtime", "1")}
    assert ("x-team", "ledger") in collector.headers
    assert capfd.readouterr().err == ""

    points = collector.points()
    assert points.pop("perfledger.telemetry.exported") in ({"": 15}, {"": 0})
    assert points == {
        "perfledger.queue.length": {"": 2},
        "perfledger.batch.width": {"": 1},
        "perfledger.kv.blocks.used": {"": 1},
        "perfledger.kv.blocks.total": {"": 9},
        "perfledger.steps": {"": 2},
        "perfledger.engine.cpu": {"": 77},
        "perfledger.tokens": {"input": 5, "cached": 0, "output": 2},
        "perfledger.requests": {"error": 1},
        "perfledger.errors": {"timeout": 1},
        "perfledger.tokens.recomputed": {"": 0},
        "perfledger.preemptions": {"": 0},
        "perfledger.out_of_memory": {"": 0},
        "perfledger.telemetry.lost": {"ring": 0, "socket": 0, "export": 0, "unmatched": 0},
    }


# --- what can go wrong ---


def steps(first: int, count: int) -> list[Record]:
    """Steps of an idle batch: four spans each (itself, schedule, forward, sample)."""
    at = (1_000, 1_010, 1_080, 1_090, 1_100)
    return [Step(seq, *at, 0, 0, 1, 0, 0, 9, 1) for seq in range(first, first + count)]


def write_paced(running: Running, turns: int, count: int) -> int:
    """Write much more than the ring holds, each time once it is drained; return the spans due."""
    for turn in range(turns):
        running.write(*steps(turn * count, count))
        wait_until(lambda: running.ring.unread == 0, END_S, "draining")
    return turns * count * 4


def test_without_a_collector_the_ring_is_drained_and_the_loss_counted(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    point_at(monkeypatch, free_port())
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
    running = Running(slots=2048)
    running.write(*steps(0, 1))
    wait_until(lambda: running.ring.counts().export_failed == 4, END_S, "the first loss")
    spans = 4 + write_paced(running, turns=6, count=1000)
    assert running.stop() == Counts(0, 0, spans)
    lines = capfd.readouterr().err.splitlines()
    assert lines == [
        "perfledger exporter: the collector takes no spans: they are counted as lost until it does"
    ]


def test_a_collector_that_never_answers_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, asleep = threading.Event(), threading.Event()

    def sleep() -> None:
        asked.set()
        asleep.wait(60)

    with grpc_collector(free_port(), sleep) as collector:
        point_at(monkeypatch, collector.port)
        running = Running(slots=2048)
        running.write(*steps(0, 1))
        assert asked.wait(END_S)  # from here on it is stuck
        spans = 4 + write_paced(running, turns=6, count=1000)
        counts = running.stop()
        asleep.set()
    assert counts == Counts(0, 0, spans)


def test_a_collector_that_comes_back_gets_what_was_not_given_up(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    point_at(monkeypatch, port)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    running = Running()
    running.write(*steps(0, 100))
    wait_until(lambda: running.ring.counts().export_failed == 400, END_S, "the loss")
    written = 100
    with grpc_collector(port) as collector:
        deadline = time.monotonic() + END_S
        while not running.ring.counts().exported:
            assert time.monotonic() < deadline, "the collector came back and gets nothing"
            running.write(*steps(written, 50))  # the first may go with the old connection
            written += 50
            time.sleep(0.5)
        counts = running.stop()
    assert counts.exported + counts.export_failed == 4 * written
    assert len(collector.spans()) == counts.exported
    assert collector.points()["perfledger.telemetry.lost"]["export"] == counts.export_failed
    assert [line[:42] for line in capfd.readouterr().err.splitlines()] == [
        "perfledger exporter: the collector takes n",
        "perfledger exporter: the collector takes s",
    ]


def test_what_the_ring_and_the_socket_dropped_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc_collector(free_port()) as collector:
        point_at(monkeypatch, collector.port)
        running = Running(slots=4)
        running.write(*steps(0, 7))  # before the process can read: four fit
        huge = RequestRecord(9, 1, 2, None, "chat", 1, 2, "ok", {"a": "x" * 70_000}, [])
        running.sender.send(huge)
        running.sender.send(REQUEST)
        counts = running.stop()
    assert (counts, running.sender.dropped) == (Counts(3, 4 * 4 + 2 + 1, 0), 1)
    gaps = [span for span in collector.spans() if span.name == "telemetry_dropped"]
    assert [attributes(gap.attributes) for gap in gaps] == [
        {"perfledger.replica": "0", "perfledger.rank": 0, "perfledger.dropped": 3}
    ]
    lost = {"ring": 3, "socket": 1, "export": 0, "unmatched": 0}
    assert collector.points()["perfledger.telemetry.lost"] == lost


def test_ctrl_c_is_the_parents_business(monkeypatch: pytest.MonkeyPatch) -> None:
    with grpc_collector(free_port()) as collector:
        point_at(monkeypatch, collector.port)
        running = Running()
        running.write(*steps(0, 1))
        wait_until(lambda: running.ring.counts().exported == 4, END_S, "the first spans")
        assert running.process.pid is not None
        os.kill(running.process.pid, signal.SIGINT)
        running.write(*steps(1, 1))
        assert running.stop() == Counts(0, 8, 0)


KILLED_PARENT = """
import multiprocessing, os, signal, time
from perfledger.instrumented_runtime import exporter
from perfledger.instrumented_runtime.records import STEP
from perfledger.instrumented_runtime.ring import Ring, Writer
from perfledger.instrumented_runtime.telemetry import RankRing, open_channel
from perfledger.schema.clocks import take_anchor

if __name__ == "__main__":
    ring, (near, far) = Ring.create(64), open_channel()
    arguments = ([RankRing(ring.name)], far, take_anchor(), {"service.name": "orphan"})
    process = multiprocessing.get_context("spawn").Process(target=exporter.main, args=arguments)
    process.start()
    far.close()
    writer = Writer.attach(ring.name)
    writer.write(STEP, (1, 10, 11, 12, 13, 14, 0, 0, 1, 0, 0, 9, 1, 0))
    while not ring.counts().exported:
        time.sleep(0.01)
    writer.write(STEP, (2, 20, 21, 22, 23, 24, 0, 0, 1, 0, 0, 9, 1, 0))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_when_the_parent_is_killed_the_rest_is_sent_and_the_process_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(KILLED_PARENT)
    with grpc_collector(free_port()) as collector:
        point_at(monkeypatch, collector.port)
        command = [sys.executable, "-P", "-W", "error", str(script)]
        # Its output ends when the last process that holds it ends: the exporter.
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert len(collector.spans()) == 8


# --- what the environment says ---


def test_switched_off_it_drains_the_ring_and_sends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with grpc_collector(free_port()) as collector:
        point_at(monkeypatch, collector.port)
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
        running = Running(slots=64)
        running.sender.send(REQUEST)
        write_paced(running, turns=3, count=60)
        assert running.stop() == Counts(0, 0, 0)
    assert (collector.traces, collector.metrics) == ([], [])


def test_a_protocol_that_is_not_spoken_is_an_error_that_says_what_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    point_at(monkeypatch, free_port(), "http/json")
    running = Running()
    running.stop()
    assert running.process.exitcode == 2
    assert capfd.readouterr().err == (
        "perfledger exporter: cannot export traces by otlp http/json "
        "(OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_PROTOCOL)\n"
        "  try: use otlp with grpc or http/protobuf, or none\n"
    )


def test_the_process_that_starts_it_does_not_import_opentelemetry() -> None:
    check = (
        "import sys, perfledger.instrumented_runtime.exporter;"
        "print([name for name in sys.modules if name in ('opentelemetry', 'grpc', 'torch')])"
    )
    run = subprocess.run([sys.executable, "-P", "-c", check], capture_output=True, text=True)
    assert run.stdout == "[]\n"


# --- the buffer ---


def test_more_spans_than_the_buffer_holds_are_counted_as_lost() -> None:
    accepted = InMemorySpanExporter()
    sender = otlp.SpanSender(accepted, Resource.get_empty(), ANCHOR)
    span = FinishedSpan("schedule", 1, 2, 3, 1_000, 1_001, {})
    for _ in range(4):
        sender.put([span] * 10_000)
    sender.stop(timeout_s=60)
    assert (sender.exported, sender.lost) == (otlp.BUFFER_SPANS, 40_000 - otlp.BUFFER_SPANS)
    assert len(accepted.get_finished_spans()) == otlp.BUFFER_SPANS


@pytest.mark.parametrize(
    "wrong",
    [{"start_ns": "soon"}, {"end_ns": None}, {"start_ns": 1 << 70}, {"trace_id": "x"}],
    ids=str,
)
def test_spans_that_cannot_be_sent_are_lost_said_once_and_stop_no_others(
    wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    span = FinishedSpan("schedule", 1, 2, 3, 1_000, 1_001, {})
    with grpc_collector(free_port()) as collector:
        point_at(monkeypatch, collector.port)
        sender = otlp.SpanSender(otlp.span_exporter("grpc"), Resource.get_empty(), ANCHOR)
        for lost in (2, 4):
            sender.put([span, span._replace(**wrong)])
            wait_until(lambda lost=lost: sender.lost == lost, END_S, "the loss")  # type: ignore[misc]
        sender.put([span])
        wait_until(lambda: sender.exported == 1, END_S, "the span after them")
        sender.stop(timeout_s=10)
    assert (len(collector.spans()), sender.exported, sender.lost) == (1, 1, 4)
    said = [one.message for one in caplog.records if one.name == "perfledger.exporter"]
    assert len(said) == 1
    assert said[0].startswith("spans that cannot be sent are counted as lost: ")
