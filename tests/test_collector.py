"""`perfledger collect` as a process: SDK clients, signals, kills, restarts and bad arguments."""

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import grpc
import polars as pl
import pyarrow.parquet as pq
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_traces
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (
    OTLPMetricExporter as GrpcMetricExporter,
)
from opentelemetry.exporter.otlp.proto.http import Compression, trace_exporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource as SdkResource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from otlp_client import (
    call,
    number,
    post,
    printed_counts,
    span,
    stored,
    text,
    traces,
    wait_until,
)

from perfledger.schema.attributes import SPAN_ATTRIBUTES
from perfledger.schema.store import Store

PROMOTED = [attribute.column for attribute in SPAN_ATTRIBUTES if attribute.column]
Start = Callable[..., AbstractContextManager[object]]


def sdk_exporter(kind: str, collector: object) -> SpanExporter:
    if kind.startswith("grpc"):
        compression = grpc.Compression.Gzip if kind == "grpc gzip" else None
        endpoint = f"http://127.0.0.1:{collector.grpc_port}"
        return grpc_traces.OTLPSpanExporter(endpoint, insecure=True, compression=compression)
    compression = Compression.Gzip if kind == "http gzip" else Compression.NoCompression
    endpoint = f"http://127.0.0.1:{collector.http_port}/v1/traces"
    return trace_exporter.OTLPSpanExporter(endpoint, compression=compression)


@pytest.mark.parametrize("kind", ["grpc", "grpc gzip", "http", "http gzip"])
def test_spans_of_the_sdk_arrive_whole(tmp_path: Path, start_collector: Start, kind: str) -> None:
    resource = SdkResource({"service.name": "sdk", "service.instance.id": "i", "host.name": "h"})
    with start_collector(tmp_path) as collector:
        provider = TracerProvider(resource=resource)
        provider.add_span_processor(BatchSpanProcessor(sdk_exporter(kind, collector)))
        tracer = provider.get_tracer("scope", "9")
        linked = trace.SpanContext(7, 8, is_remote=True)
        root = tracer.start_span(
            "chat",
            kind=trace.SpanKind.SERVER,
            attributes={"gen_ai.request.model": "m", "gen_ai.usage.output_tokens": 4, "x": [1, 2]},
            links=[trace.Link(linked, {"perfledger.phase": "decode", "perfledger.tokens": 1})],
            start_time=1_000,
        )
        root.add_event("first", {"n": 1}, timestamp=1_500)
        child = tracer.start_span(
            "queue", context=trace.set_span_in_context(root), start_time=1_100
        )
        child.end(1_200)
        root.set_status(trace.Status(trace.StatusCode.ERROR, "slow"))
        root.end(2_000)
        provider.shutdown()
    rows = {row["name"]: row for row in stored(collector.store, "spans").to_dicts()}
    trace_id = root.get_span_context().trace_id.to_bytes(16, "big")
    root_id = root.get_span_context().span_id.to_bytes(8, "big")
    empty = dict.fromkeys(("text", "int", "double", "bool", "bytes", "json"))
    for row in rows.values():
        assert 0 < time.time_ns() - row.pop("received_ns") < 60e9
        row.pop("flags")
    told = {
        name: {k: v for k, v in row.items() if v not in (None, [])} for name, row in rows.items()
    }
    shared = {
        "trace_id": trace_id,
        "time_repaired": False,
        "service_name": "sdk",
        "service_instance_id": "i",
        "scope_name": "scope",
        "scope_version": "9",
        "values_cut": 0,
        "resource_attributes": '{"host.name":"h"}',
    }
    assert told == {
        "chat": {
            **shared,
            "span_id": root_id,
            "name": "chat",
            "kind": "server",
            "start_ns": 1_000,
            "end_ns": 2_000,
            "status": "error",
            "status_message": "slow",
            "model": "m",
            "output_tokens": 4,
            "attributes": [{"key": "x", **empty, "json": "[1,2]"}],
            "events": [
                {"time_ns": 1_500, "name": "first", "attributes": [{"key": "n", **empty, "int": 1}]}
            ],
            "links": [
                {
                    "trace_id": (7).to_bytes(16, "big"),
                    "span_id": (8).to_bytes(8, "big"),
                    "phase": "decode",
                    "tokens": 1,
                    "attributes": [],
                }
            ],
        },
        "queue": {
            **shared,
            "span_id": child.get_span_context().span_id.to_bytes(8, "big"),
            "parent_span_id": root_id,
            "name": "queue",
            "kind": "internal",
            "start_ns": 1_100,
            "end_ns": 1_200,
            "status": "unset",
        },
    }
    (request,) = stored(collector.store, "requests").to_dicts()
    assert (request["trace_id"], request["span_id"]) == (trace_id, root_id)
    assert (request["e2e_ns"], request["queue_ns"], request["status"]) == (1_000, 100, "error")
    assert (request["model"], request["output_tokens"], request["version"]) == ("m", 4, 1)


def test_what_a_real_vllm_sent_is_stored_span_by_span(
    tmp_path: Path, start_collector: Start, shared_data: Path
) -> None:
    raw = (shared_data / "engines" / "vllm_0.32" / "traces.bin").read_bytes()
    frames, at = [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4])
        frames.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    with start_collector(tmp_path) as collector:
        assert {call(collector.grpc_port, frame, gzipped=True) for frame in frames} == {b""}
    sent = [
        (span.trace_id, span.span_id, span.name, span.start_time_unix_nano, len(span.attributes))
        for frame in frames
        for group in ExportTraceServiceRequest.FromString(frame).resource_spans
        for scoped in group.scope_spans
        for span in scoped.spans
    ]
    spans = stored(collector.store, "spans")
    promoted = pl.sum_horizontal(pl.col(column).is_not_null() for column in PROMOTED)
    rows = spans.select(
        "trace_id", "span_id", "name", "start_ns", pl.col("attributes").list.len() + promoted
    ).rows()
    assert sorted(rows) == sorted(sent) and len(rows) == 65


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_metrics_of_the_sdk_arrive_one_row_a_point(
    tmp_path: Path, start_collector: Start, kind: str
) -> None:
    with start_collector(tmp_path) as collector:
        exporter: MetricExporter
        if kind == "grpc":
            endpoint = f"http://127.0.0.1:{collector.grpc_port}"
            exporter = GrpcMetricExporter(endpoint, insecure=True)
        else:
            exporter = OTLPMetricExporter(f"http://127.0.0.1:{collector.http_port}/v1/metrics")
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=3_600_000)
        provider = MeterProvider([reader], SdkResource({"service.name": "sdk"}))
        meter = provider.get_meter("m")
        errors = meter.create_counter("errors", unit="{error}")
        errors.add(2, {"reason": "kv_full"})
        errors.add(3, {"reason": "abort"})
        meter.create_histogram("ttft", explicit_bucket_boundaries_advisory=[1, 2]).record(1.5)
        provider.shutdown()
    points = stored(collector.store, "points").sort("name", "value").to_dicts()
    empty = dict.fromkeys(("text", "int", "double", "bool", "bytes", "json"))
    columns = ("name", "unit", "kind", "temporality", "monotonic", "value", "count", "bounds")
    assert [tuple(point[column] for column in columns) for point in points] == [
        ("errors", "{error}", "sum", "cumulative", True, 2.0, None, None),
        ("errors", "{error}", "sum", "cumulative", True, 3.0, None, None),
        ("ttft", None, "histogram", "cumulative", None, 1.5, 1, [1.0, 2.0]),
    ]
    assert [point["attributes"] for point in points] == [
        [{"key": "reason", **empty, "text": "kv_full"}],
        [{"key": "reason", **empty, "text": "abort"}],
        [],
    ]
    assert points[2]["bucket_counts"] == [0, 1, 0]


# --- Nothing acknowledged is lost, nothing comes twice ----------------------------------


def test_sigterm_under_load_writes_every_acknowledged_span(
    tmp_path: Path, start_collector: Start
) -> None:
    acknowledged: set[tuple[int, int]] = set()
    sent: set[tuple[int, int]] = set()

    def send(client: int, collector: object) -> None:
        for at in range(1, 10_000):
            batch = [(client, at * 100 + n) for n in range(20)]
            sent.update(batch)
            body = traces(*(span(n, trace_id=c) for c, n in batch))
            try:
                if client % 2:
                    call(collector.grpc_port, body)
                elif post(collector.http_port, body)[0] != 200:
                    return
            except (grpc.RpcError, OSError, http.client.HTTPException):
                return
            acknowledged.update(batch)

    with start_collector(tmp_path) as collector, ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(send, client, collector) for client in range(1, 5)]
        time.sleep(3)
        collector.process.send_signal(signal.SIGTERM)
        assert collector.process.wait(30) == 0
        for client in clients:
            client.result(60)
    spans = stored(collector.store, "spans")
    found = {
        (int.from_bytes(trace_id), int.from_bytes(span_id))
        for trace_id, span_id in spans.select("trace_id", "span_id").rows()
    }
    assert len(acknowledged) > 100
    assert acknowledged <= found <= sent
    received, written, rejected, waiting = printed_counts(collector.log)["spans"]
    assert (received, rejected, waiting) == (written, 0, 0)
    assert written >= len(acknowledged)


def test_after_a_kill_resent_spans_count_once_and_requests_are_derived(
    tmp_path: Path, start_collector: Start
) -> None:
    root = span(1, name="chat", kind=2)
    child = span(2, name="queue", parent_span_id=(1).to_bytes(8, "big"))
    child.start_time_unix_nano = root.start_time_unix_nano
    child.end_time_unix_nano = root.end_time_unix_nano - 400
    body = traces(root, child)
    with start_collector(tmp_path, "--settle", "60") as collector:
        assert post(collector.http_port, body)[0] == 200
        wait_until(lambda: stored(collector.store, "spans").height == 2)
        collector.process.kill()
        collector.process.wait()
    assert stored(collector.store, "requests").height == 0
    for _ in range(2):
        with start_collector(tmp_path) as collector:
            assert post(collector.http_port, traces(root))[0] == 200
            assert call(collector.grpc_port, body) == b""
    store = Store.at(str(collector.store))
    files = store.files("spans")
    assert sum(pq.read_metadata(path).num_rows for path in files) == 2
    assert sorted(stored(collector.store, "spans")["name"]) == ["chat", "queue"]
    (request,) = stored(collector.store, "requests").to_dicts()
    assert (request["version"], request["e2e_ns"]) == (1, 1000)
    assert (request["queue_ns"], request["unattributed_ns"]) == (600, 400)
    assert sum(pq.read_metadata(path).num_rows for path in store.files("requests")) == 1


def test_steps_and_requests_appear_while_the_collector_runs(
    tmp_path: Path, start_collector: Start
) -> None:
    at = time.time_ns()
    root_id, step_id = (1).to_bytes(8, "big"), (10).to_bytes(8, "big")
    link = trace_pb2.Span.Link(
        trace_id=(1).to_bytes(16, "big"),
        span_id=root_id,
        attributes=[text("perfledger.phase", "prefill"), number("perfledger.tokens", 5)],
    )

    def during(span_id: int, name: str, start: int, end: int, **fields: object) -> trace_pb2.Span:
        times = {"start_time_unix_nano": at + start, "end_time_unix_nano": at + end}
        return span(span_id, name=name, **times, **fields)

    step = [
        during(
            10,
            "prefill_step",
            100,
            400,
            trace_id=2,
            links=[link],
            attributes=[
                text("perfledger.replica", "0"),
                number("perfledger.rank", 0),
                number("perfledger.step.seq", 3),
                number("perfledger.step.width", 1),
            ],
        ),
        during(11, "schedule", 100, 150, trace_id=2, parent_span_id=step_id),
        during(12, "sample", 380, 400, trace_id=2, parent_span_id=step_id),
    ]
    with start_collector(tmp_path, "--settle", "0.3") as collector:
        call(collector.grpc_port, traces(*step))
        tokens = [number("gen_ai.usage.output_tokens", 1)]
        call(collector.grpc_port, traces(during(1, "chat", 0, 1000, kind=2, attributes=tokens)))
        wait_until(lambda: stored(collector.store, "requests").height == 1)
        (row,) = stored(collector.store, "steps").to_dicts()
        (request,) = stored(collector.store, "requests").to_dicts()
    assert (row["step_seq"], row["width"], row["kind"]) == (3, 1, "prefill_step")
    assert (row["schedule_end_ns"], row["sample_start_ns"]) == (at + 150, at + 380)
    assert row["members"] == [
        {"trace_id": link.trace_id, "span_id": root_id, "phase": "prefill", "tokens": 5}
    ]
    assert (request["prefill_ns"], request["sample_ns"], request["ttft_ns"]) == (230, 20, 400)


# --- Starting ---------------------------------------------------------------------------


def collect_fails(*arguments: str) -> str:
    """Run `perfledger collect`, which must end with 2, and return what it says."""
    command = [sys.executable, "-P", "-m", "perfledger", "collect", "--metrics", "off", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("flag", ["--otlp-grpc", "--otlp-http"])
def test_a_port_in_use_is_a_clear_error(tmp_path: Path, flag: str) -> None:
    other = {"--otlp-grpc": "--otlp-http", "--otlp-http": "--otlp-grpc"}[flag]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["--store", str(tmp_path), flag, address, other, "127.0.0.1:0"]
        message = collect_fails(*arguments)
    assert f"cannot listen on {address}" in message and f"{flag} HOST:PORT" in message


def test_two_collectors_never_share_a_grpc_port(tmp_path: Path, start_collector: Start) -> None:
    with start_collector(tmp_path) as collector:
        address = f"127.0.0.1:{collector.grpc_port}"
        arguments = ["--store", str(tmp_path), "--otlp-grpc", address]
        assert "cannot listen" in collect_fails(*arguments, "--otlp-http", "127.0.0.1:0")


def test_a_store_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    message = collect_fails("--store", str(tmp_path / "file" / "store"))
    assert "cannot write to the store" in message and "--store" in message


@pytest.mark.parametrize("address", ["0.0.0.0:4317", "[::]:4317", "example.org:4317"])
def test_other_hosts_are_let_in_only_on_request(tmp_path: Path, address: str) -> None:
    message = collect_fails("--store", str(tmp_path), "--otlp-grpc", address)
    assert "--insecure" in message


@pytest.mark.parametrize(
    "address", ["4317", ":4317", "localhost", "localhost:x", "localhost:70000"]
)
def test_an_address_is_host_and_port(tmp_path: Path, address: str) -> None:
    message = collect_fails("--store", str(tmp_path), "--otlp-http", address)
    assert "not HOST:PORT" in message


@pytest.mark.parametrize("flag", ["--settle=nan", "--settle=0", "--settle=-1", "--buffer-mib=0"])
def test_limits_must_make_sense(tmp_path: Path, flag: str) -> None:
    assert f"{flag.partition('=')[0]} must be more than 0" in collect_fails(
        "--store", str(tmp_path), flag
    )


def test_ctrl_c_ends_with_0_and_says_what_was_received(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "perfledger", "collect", "--store", str(tmp_path)]
    command += ["--otlp-grpc", "127.0.0.1:0", "--otlp-http", "127.0.0.1:0", "--metrics", "off"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == f"collecting into {tmp_path}, namespace default\n"
    listening = process.stdout.readline()
    port = int(listening.rpartition(":")[2])
    assert post(port, traces(span(1)))[0] == 200
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert output.splitlines()[2].split() == ["spans", "1", "1", "0", "0", "0", "0"]


def test_on_a_terminal_one_line_says_how_it_goes(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "perfledger", "collect", "--store", str(tmp_path)]
    command += ["--otlp-grpc", "127.0.0.1:0", "--otlp-http", "127.0.0.1:0", "--metrics", "off"]
    terminal, end = os.openpty()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=end)
    line = b""
    while b"requests derived" not in line:
        line += os.read(terminal, 1000)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    os.close(end)
    os.close(terminal)
    assert line.decode().removeprefix("\r\x1b[2K") == (
        "0 spans received, 0 spans written, 0 spans rejected, 0 requests derived"
    )
