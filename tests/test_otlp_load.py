"""The load client of the collector's benchmarks: what it sends again, when, and what it notes."""

import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from fresh_requests import FreshRequests  # noqa: E402
from otlp_load import Acks, Load, Schedule, run_load, send_all, write_bodies  # noqa: E402
from reference_payload import requests, spans_of  # noqa: E402

RETRY_S = 0.3
BUSY, BROKEN, BAD, OK = "busy", "broken", "bad", "ok"


class Script:
    """What a receiver answers, one after the other, then OK; and the bodies it was sent."""

    def __init__(self, *answers: str) -> None:
        self._answers, self._lock = list(answers), threading.Lock()
        self.received: list[tuple[float, bytes]] = []

    def next(self, body: bytes) -> str:
        with self._lock:
            self.received.append((time.monotonic(), body))
            return self._answers.pop(0) if self._answers else OK


@contextmanager
def http_receiver(script: Script) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            answer = script.next(self.rfile.read(int(self.headers["Content-Length"])))
            if answer == BROKEN:
                self.close_connection = True
                return
            self.send_response({BUSY: 503, BAD: 400, OK: 200}[answer])
            if answer == BUSY:
                self.send_header("Retry-After", str(RETRY_S))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def grpc_receiver(script: Script) -> Iterator[int]:
    wait = RetryInfo(retry_delay=Duration(nanos=int(RETRY_S * 1e9))).SerializeToString()

    def export(body: bytes, context: grpc.ServicerContext) -> bytes:
        answer = script.next(body)
        if answer == BUSY:
            context.set_trailing_metadata([("google.rpc.retryinfo-bin", wait)])
        codes = {BUSY: "UNAVAILABLE", BROKEN: "UNAVAILABLE", BAD: "INVALID_ARGUMENT"}
        if answer != OK:
            context.abort(grpc.StatusCode[codes[answer]], answer)
        return b""

    class Everything(grpc.GenericRpcHandler):
        def service(self, _: object) -> object:
            return grpc.unary_unary_rpc_method_handler(export)

    server = grpc.server(ThreadPoolExecutor(4), handlers=[Everything()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


RECEIVERS = {"http": http_receiver, "grpc": grpc_receiver}


@pytest.fixture(scope="module")
def body() -> FreshRequests:
    return FreshRequests.of(requests(1)[0], seed=3)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_refused_and_broken_requests_are_sent_again_with_the_same_bytes(
    protocol: str, body: FreshRequests
) -> None:
    script = Script(BUSY, BROKEN)
    with RECEIVERS[protocol](script) as port:
        rows, refusals = send_all(protocol, port, 1, [body], Schedule(None, 2, None))
    assert [(row[0], row[-1]) for row in rows] == [(0, 3), (1, 1)]
    assert all(sent_ns < acked_ns for _, _, sent_ns, acked_ns, _ in rows)
    assert len(refusals) == 2
    first, second, third, fourth = (content for _, content in script.received)
    assert first == second == third != fourth
    assert script.received[1][0] - script.received[0][0] >= RETRY_S
    ids = [int.from_bytes(span.span_id, "little") for span in spans_of(fourth)]
    assert np.array_equal(np.array(ids, np.uint64), body.span_ids(1))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_what_is_refused_for_good_is_not_sent_again(protocol: str, body: FreshRequests) -> None:
    script = Script(BAD)
    with RECEIVERS[protocol](script) as port:
        rows, refusals = send_all(protocol, port, 1, [body], Schedule(None, 2, None))
    assert [(number, acked > 0, tries) for number, _, _, acked, tries in rows] == [
        (0, False, 1),
        (1, True, 1),
    ]
    assert refusals == [{"http": "400", "grpc": "INVALID_ARGUMENT"}[protocol]]
    assert len(script.received) == 2


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_client_process_notes_what_was_acknowledged(protocol: str, tmp_path: Path) -> None:
    bodies, script = write_bodies(tmp_path / "bodies", "reference", 2, workers=1), Script(BUSY, BAD)
    with RECEIVERS[protocol](script) as port:
        plan = Load(protocol, port, bodies, seed=9, connections=3, requests=12, rate=400)
        acks = run_load(plan, tmp_path / "acks.npz")
    assert sorted(acks.number) == list(range(12))
    assert (acks.spans, acks.refused, len(acks.refusals)) == (11 * 512, 1, 2)
    every_ms = np.diff(np.sort(acks.due_ns)) / 1e6
    assert np.allclose(every_ms, 2.5, atol=0.01)
    assert acks.latency_ms().min() > 0 and acks.answer_ms().min() > 0
    assert_ids_are_those_received(acks, script)


def assert_ids_are_those_received(acks: Acks, script: Script) -> None:
    received = {
        int.from_bytes(span.span_id, "little")
        for _, content in script.received
        for span in spans_of(content)
    }
    told, untold = (set(acks.ids(acknowledged).tolist()) for acknowledged in (True, False))
    assert (len(told), len(untold)) == (11 * 512, 512)
    assert told | untold == received


def test_a_stopped_schedule_hands_out_nothing_more() -> None:
    plan = Schedule(rate=100.0, requests=None, seconds=None)
    first, second = plan.take(), plan.take()
    assert first is not None and second is not None
    assert (first[0], second[0], second[1] - first[1]) == (0, 1, 10_000_000)
    plan.stopped.set()
    assert plan.take() is None
