"""What the OTLP servers answer, over HTTP and gRPC: success, partial success and every refusal."""

import contextlib
import gzip
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from google.protobuf.json_format import Parse
from google.rpc.code_pb2 import Code
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from otlp_client import (
    PROTOBUF,
    TRACE_SERVICE,
    call,
    grpc_refusal,
    post,
    printed_counts,
    span,
    stored,
    traces,
    wait_until,
)
from serving_in_thread import serving

from perfledger.collectors.collecting import CollectLimits, Collector

Start = Callable[..., AbstractContextManager[object]]


@contextmanager
def in_process(folder: Path, limits: CollectLimits, **options: object) -> Iterator[tuple[int, int]]:
    """Serve in a thread, for limits that have no flag; yield the gRPC and the HTTP port."""
    with serving(folder, limits, **options) as bound:
        yield bound.grpc.port, bound.http.port


# --- What HTTP answers ------------------------------------------------------------------

GOOD = traces(span(1))


@pytest.fixture(scope="module")
def http_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A collector that takes requests of at most 100 kB."""
    limits = CollectLimits(request_bytes=100_000)
    with in_process(tmp_path_factory.mktemp("http"), limits) as (_, port):
        yield port


def with_encoding(name: str) -> dict[str, str]:
    return {**PROTOBUF, "Content-Encoding": name}


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (GOOD, PROTOBUF),
        (b"", PROTOBUF),
        (GOOD, {"Content-Type": "Application/X-Protobuf; charset=utf-8"}),
        (GOOD, with_encoding("identity")),
        (gzip.compress(GOOD), with_encoding("gzip")),
        (gzip.compress(GOOD[:9]) + gzip.compress(GOOD[9:]), with_encoding("GZIP")),
    ],
    ids=["plain", "empty", "parameters", "identity", "gzip", "gzip members"],
)
def test_full_success_is_200_with_an_empty_response(
    http_port: int, body: bytes, headers: dict[str, str]
) -> None:
    status, answer, content = post(http_port, body, headers)
    assert (status, answer["content-type"], content) == (200, "application/x-protobuf", b"")


BOMB = gzip.compress(bytes(10_000_000))
REFUSED = {
    "not protobuf": (b"\xff" * 9, PROTOBUF, 400, Code.INVALID_ARGUMENT),
    "not gzip": (GOOD, with_encoding("gzip"), 400, Code.INVALID_ARGUMENT),
    "cut gzip": (gzip.compress(GOOD)[:-4], with_encoding("gzip"), 400, Code.INVALID_ARGUMENT),
    "no gzip at all": (b"", with_encoding("gzip"), 400, Code.INVALID_ARGUMENT),
    "other encoding": (GOOD, with_encoding("br"), 415, Code.INVALID_ARGUMENT),
    "gzip bomb": (BOMB, with_encoding("gzip"), 413, Code.RESOURCE_EXHAUSTED),
    "too large": (bytes(100_001), PROTOBUF, 413, Code.RESOURCE_EXHAUSTED),
    "much gzip of nothing": (
        gzip.compress(b"") * 6_000,
        with_encoding("gzip"),
        413,
        Code.RESOURCE_EXHAUSTED,
    ),
    "gzip of too many members": (
        gzip.compress(b"") * 1_001,
        with_encoding("gzip"),
        400,
        Code.INVALID_ARGUMENT,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_is_a_status_in_protobuf(http_port: int, case: str) -> None:
    body, headers, expected, code = REFUSED[case]
    status, answer, content = post(http_port, body, headers)
    assert (status, answer["content-type"]) == (expected, "application/x-protobuf")
    told = Status.FromString(content)
    assert told.code == code and told.message
    assert "retry-after" not in answer
    details = [detail.type_url.rpartition(".")[2] for detail in told.details]
    assert details == (["BadRequest"] if expected == 400 else [])


@pytest.mark.parametrize(
    ("content_type", "answered_in"),
    [
        ("application/jsonlines", "application/json"),
        ("text/plain", "application/json"),
        ("", "application/json"),
    ],
)
def test_other_content_types_are_415_with_a_status_in_json(
    http_port: int, content_type: str, answered_in: str
) -> None:
    status, answer, content = post(http_port, b"{}", {"Content-Type": content_type})
    assert (status, answer["content-type"]) == (415, answered_in)
    assert Parse(content, Status()).code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_405(http_port: int, method: str) -> None:
    status, answer, content = post(http_port, b"", method=method)
    assert (status, answer["allow"]) == (405, "POST")
    assert Status.FromString(content).code == Code.UNIMPLEMENTED


@pytest.mark.parametrize("path", ["/", "/v1/trace", "/v1/traces/", "/v1development/profiles"])
def test_other_paths_are_404_and_say_where_to_go(http_port: int, path: str) -> None:
    status, _, content = post(http_port, GOOD, path=path)
    assert (status, "/v1/traces" in Status.FromString(content).message) == (404, True)


def test_a_client_that_goes_away_is_no_harm(http_port: int) -> None:
    head = b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
    for unfinished in (b"", head, head + b"Content-Length: 900\r\n\r\nabc"):
        with socket.create_connection(("127.0.0.1", http_port)) as client:
            client.sendall(unfinished)
    assert post(http_port, GOOD)[0] == 200


# --- Partial success, limits and back-pressure ------------------------------------------


def test_a_bad_span_is_rejected_alone_on_both_transports(
    tmp_path: Path, start_collector: Start
) -> None:
    bodies = [traces(span(n), span(0), span(n + 1)) for n in (1, 3)]
    with start_collector(tmp_path) as collector:
        status, _, content = post(collector.http_port, bodies[0])
        answers = [content, call(collector.grpc_port, bodies[1])]
    assert status == 200
    for answer in answers:
        partial = ExportTraceServiceResponse.FromString(answer).partial_success
        assert partial.rejected_spans == 1
        assert partial.error_message == "1: span_id is not 8 bytes, or all zero"
    spans = stored(collector.store, "spans")
    assert sorted(spans["span_id"]) == [n.to_bytes(8, "big") for n in (1, 2, 3, 4)]
    assert printed_counts(collector.log)["spans"] == [6, 4, 2, 0]


@pytest.mark.parametrize("gzipped", [False, True])
def test_grpc_refuses_what_is_too_large_for_good(tmp_path: Path, gzipped: bool) -> None:
    with (
        in_process(tmp_path, CollectLimits(request_bytes=100_000)) as (port, _),
        pytest.raises(grpc.RpcError) as caught,
    ):
        call(port, bytes(10_000_000), gzipped=gzipped)
        assert grpc_refusal(caught.value) == (grpc.StatusCode.RESOURCE_EXHAUSTED, [], None)
        assert call(port, GOOD, gzipped=gzipped) == b""


def test_grpc_says_what_is_wrong_with_bytes_that_are_no_request(
    tmp_path: Path, start_collector: Start
) -> None:
    with start_collector(tmp_path) as collector:
        with pytest.raises(grpc.RpcError) as caught:
            call(collector.grpc_port, b"\xff" * 9)
        refusal = (grpc.StatusCode.INVALID_ARGUMENT, ["BadRequest"], None)
        assert grpc_refusal(caught.value) == refusal
        with pytest.raises(grpc.RpcError) as caught:
            call(collector.grpc_port, GOOD, service="x.Y")
        assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_while_nothing_can_be_written_requests_are_refused_and_then_nothing_is_lost(
    tmp_path: Path, start_collector: Start
) -> None:
    spans = tmp_path / "store" / "default" / "spans"
    acknowledged = 0
    with start_collector(tmp_path, "--buffer-mib", "1") as collector:
        spans.write_text("in the way")
        assert post(collector.http_port, GOOD)[0] == 200
        wait_until(lambda: "cannot write to the store" in collector.log.read_text())
        for at in range(1, 400):
            body = traces(*(span(at * 1000 + n, name="x" * 500) for n in range(50)))
            status, answer, content = post(collector.http_port, body)
            if status != 200:
                break
            acknowledged += 50
        assert (status, answer["retry-after"]) == (503, "1")
        told = Status.FromString(content)
        assert (told.code, told.details[0].type_url.endswith(".RetryInfo")) == (14, True)
        with pytest.raises(grpc.RpcError) as caught:
            call(collector.grpc_port, GOOD)
        assert grpc_refusal(caught.value) == (grpc.StatusCode.UNAVAILABLE, ["RetryInfo"], 1.0)
        spans.unlink()
        wait_until(lambda: post(collector.http_port, GOOD)[0] == 200)
    assert 1000 < acknowledged < 20_000
    assert stored(collector.store, "spans").height == acknowledged + 1


# --- Senders that stall -----------------------------------------------------------------


def stalled(port: int, body: bytes, headers: bytes = b"") -> http.client.HTTPResponse:
    """Announce one byte more than is sent; return the answer."""
    client = socket.create_connection(("127.0.0.1", port), timeout=30)
    client.sendall(
        b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
        + headers
        + b"Content-Length: %d\r\n\r\n" % (len(body) + 1)
        + body
    )
    answer = http.client.HTTPResponse(client)
    answer.begin()
    return answer


@pytest.mark.parametrize("encoding", [b"", b"Content-Encoding: gzip\r\n"])
def test_a_stalled_upload_gives_its_memory_back(tmp_path: Path, encoding: bytes) -> None:
    limits = CollectLimits(request_bytes=100_000, buffer_bytes=100_000)
    body = bytes(90_000)
    if encoding:
        body = gzip.compress(body)
    with in_process(tmp_path, limits, read_timeout_s=0.3) as (_, port):
        for _ in range(5):  # would be over the buffer, were it held
            answer = stalled(port, body, encoding)
            assert (answer.status, answer.headers["Content-Type"]) == (
                408,
                "application/x-protobuf",
            )
            assert Status.FromString(answer.read()).code == Code.DEADLINE_EXCEEDED
        assert post(port, GOOD)[0] == 200


def test_who_opens_a_grpc_connection_and_says_nothing_is_let_go(tmp_path: Path) -> None:
    with in_process(tmp_path, CollectLimits()) as (port, _), contextlib.ExitStack() as crowd:
        clients = [
            crowd.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            for _ in range(3)
        ]
        for client, said in zip(clients, (b"", b"PRI", b"GET / HTTP/1.1\r\n"), strict=True):
            client.sendall(said)
        for client in clients:
            with contextlib.suppress(ConnectionError):
                while client.recv(1000):
                    pass
        assert call(port, GOOD) == b""


@contextmanager
def silent_calls(port: int, count: int) -> Iterator[list[grpc.Future]]:
    """Make calls on a connection of their own, none of which sends its message."""
    release = threading.Event()

    def never() -> Iterator[bytes]:
        release.wait(60)
        yield from ()

    # Otherwise channels of the same options share one connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        export = channel.stream_unary(f"/{TRACE_SERVICE}/Export")
        calls = [export.future(never()) for _ in range(count)]
        try:
            yield calls
        finally:
            release.set()
            for one in calls:
                one.cancel()


def test_grpc_reads_no_more_messages_than_there_is_room_for(tmp_path: Path) -> None:
    """Two calls that stall take both turns; the others wait, then all are answered."""
    limits = CollectLimits(request_bytes=200_000, buffer_bytes=390_000)
    with (
        in_process(tmp_path, limits, read_timeout_s=3.0) as (port, _),
        silent_calls(port, 2) as stuck,
    ):
        time.sleep(1)  # who waits as long as these may take is refused
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda n: call(port, traces(span(n))), range(1, 9)))
        codes = [call.exception(30).code() for call in stuck]
    assert answers == [b""] * 8
    assert codes == [grpc.StatusCode.DEADLINE_EXCEEDED] * 2


def test_a_grpc_call_that_ends_without_a_message_is_undecodable(tmp_path: Path) -> None:
    with (
        in_process(tmp_path, CollectLimits()) as (port, _),
        grpc.insecure_channel(f"127.0.0.1:{port}") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.stream_unary(f"/{TRACE_SERVICE}/Export")(iter(()), timeout=30)
    assert grpc_refusal(caught.value)[:2] == (grpc.StatusCode.INVALID_ARGUMENT, ["BadRequest"])


def test_silent_calls_of_few_grpc_connections_do_not_keep_others_waiting(tmp_path: Path) -> None:
    """Two connections, twelve silent calls each, seven turns: there is a turn left for another."""
    limits = CollectLimits(request_bytes=200_000, buffer_bytes=1_200_000)
    with (
        in_process(tmp_path, limits, read_timeout_s=20.0) as (port, _),
        silent_calls(port, 12) as silent,
        silent_calls(port, 12) as more,
    ):
        time.sleep(1)  # until they are there
        assert [call(port, traces(span(n))) for n in range(1, 9)] == [b""] * 8
        assert not any(one.done() for one in silent + more)


def test_a_grpc_call_does_not_wait_for_its_turn_for_ever(tmp_path: Path) -> None:
    """Of one connection two are read, then perhaps two more; the others may come again."""
    with (
        in_process(tmp_path, CollectLimits(), read_timeout_s=1.0) as (port, _),
        silent_calls(port, 20) as silent,
    ):
        told = [grpc_refusal(one.exception(30)) for one in silent]
        assert call(port, GOOD) == b""
    late = (grpc.StatusCode.DEADLINE_EXCEEDED, [], None)
    again = (grpc.StatusCode.UNAVAILABLE, ["RetryInfo"], 1.0)
    assert told.count(late) >= 2 and told.count(again) > 0
    assert told.count(late) + told.count(again) == 20


# --- Defects of ours --------------------------------------------------------------------


class Defective(Collector):
    """A collector with a defect, whose error quotes what it was given."""

    async def export(self, *given: object) -> NoReturn:
        raise ValueError(f"cannot take {given}")


def test_a_defect_is_answered_counted_and_logged_without_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("serving_in_thread.Collector", Defective)
    with serving(tmp_path) as bound:
        status, _, content = post(bound.http.port, traces(span(1, name="canary")))
        with pytest.raises(grpc.RpcError) as caught:
            call(bound.grpc.port, traces(span(1, name="canary")))
        counted = post(bound.metrics.port, b"", path="/metrics", method="GET")[2].decode()
    message = "the collector failed on this request"
    told = Status.FromString(content)
    assert (status, told.code, told.message) == (500, Code.INTERNAL, message)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, message)
    refused = [line for line in counted.splitlines() if 'status="500"' in line]
    assert [line.split()[-1] for line in refused] == ["2"]
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2
    for line in logged:
        assert line.startswith("a request failed: ValueError\n") and "in export" in line
    assert "canary" not in caplog.text + content.decode("latin-1") + str(caught.value)
