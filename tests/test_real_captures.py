"""What a real vLLM 0.32 sent, replayed over each way in: every row is whole, and all are alike."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import polars as pl
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_client import call, post, printed_counts, stored
from otlp_json_text import as_json
from span_oracle import oracle

from perfledger.collectors.attribute_values import DEFAULT_MAX_VALUE_BYTES

Start = Callable[..., AbstractContextManager[object]]
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def frames(shared_data: Path) -> list[bytes]:
    """The 13 requests of the capture, as they came."""
    path = shared_data / "engines" / "vllm_0.32" / "traces.bin"
    if not path.exists():
        pytest.skip("no capture beside this checkout")
    raw, found, at = path.read_bytes(), [], 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4])
        found.append(raw[at + 4 : at + 4 + size])
        at += 4 + size
    assert len(found) == 13
    return found


def send_grpc(collector: object, frame: bytes) -> None:
    assert call(collector.grpc_port, frame) == b""


def send_http(collector: object, frame: bytes) -> None:
    assert post(collector.http_port, frame)[::2] == (200, b"")


def send_json(collector: object, frame: bytes) -> None:
    request = as_json(ExportTraceServiceRequest.FromString(frame)).encode()
    assert post(collector.http_port, request, JSON)[::2] == (200, b"{}")


@pytest.mark.parametrize("send", [send_grpc, send_http, send_json])
def test_every_span_of_a_real_vllm_is_a_whole_row(
    tmp_path: Path,
    start_collector: Start,
    frames: list[bytes],
    send: Callable[[object, bytes], None],
) -> None:
    with start_collector(tmp_path, "--settle", "1") as collector:
        for frame in frames:
            send(collector, frame)
        for frame in frames[::3]:  # as a client does that did not hear the answer
            send(collector, frame)
    expected = pl.concat(
        pl.DataFrame(oracle(frame, 0, DEFAULT_MAX_VALUE_BYTES)[0]) for frame in frames
    )
    rows = stored(collector.store, "spans")
    order = ["trace_id", "span_id", "name", "start_ns", "end_ns"]
    assert rows.height == expected.height == 65
    told = rows.drop("received_ns").sort(order).to_dicts()
    assert told == expected.drop("received_ns").sort(order).to_dicts()
    received, written, rejected, waiting = printed_counts(collector.log)["spans"]
    assert (written, rejected, waiting) == (65, 0, 0) and received > 65
