"""Clients that stall, trickle, flood or crowd get no more than their share of the HTTP server."""

import asyncio
import contextlib
import gzip
import http.client
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf.json_format import Parse
from google.rpc.status_pb2 import Status
from otlp_client import PROTOBUF, post, span, traces
from serving_in_thread import serving

from perfledger.collectors.collecting import CollectLimits
from perfledger.collectors.transport.http_body import read_body
from perfledger.collectors.transport.otlp_receiver import Refusal

HEAD = b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
GOOD = traces(span(1))
MOST_CONNECTIONS, HEAD_S, BODY_S = 8, 1.0, 1.0


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with serving(
        tmp_path_factory.mktemp("store"),
        CollectLimits(request_bytes=100_000),
        connections=MOST_CONNECTIONS,
        head_timeout_s=HEAD_S,
        read_timeout_s=BODY_S / 2,
    ) as bound:
        yield bound.http.port


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def is_closed(client: socket.socket) -> bool:
    """Wait for the server to end the connection; return whether it did without an answer."""
    try:
        return client.recv(1000) == b""
    except ConnectionError:
        return True


def trickle(client: socket.socket, piece: bytes, every_s: float) -> float:
    """Send a piece again and again; return after how long the server had enough."""
    started = time.monotonic()
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - started < 20:
            client.sendall(piece)
            time.sleep(every_s)
    return time.monotonic() - started


@pytest.mark.parametrize("said", [b"", b"P", b"POST /v1/traces HTTP/1.1\r\n", HEAD])
def test_who_does_not_finish_the_head_is_let_go(port: int, said: bytes) -> None:
    with connect(port) as client:
        client.sendall(said)
        assert is_closed(client)
    assert post(port, GOOD)[0] == 200


@pytest.mark.parametrize("before", [b"", b"POST /", HEAD])
def test_a_head_in_drops_is_let_go_too(port: int, before: bytes) -> None:
    with connect(port) as client:
        client.sendall(before)
        lasted_s = trickle(client, b"a" if before != HEAD else b"X-A: b\r\n", 0.05)
    assert lasted_s < 10 * HEAD_S


def test_the_next_request_of_a_connection_has_a_deadline_as_well(port: int) -> None:
    with connect(port) as client:
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD)
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
        client.sendall(b"POST")
        assert is_closed(client)


def test_a_body_in_drops_is_answered_and_let_go(port: int) -> None:
    with connect(port) as client:
        client.sendall(HEAD + b"Content-Length: 90000\r\n\r\n")
        lasted_s = trickle(client, b"a", 0.05)
        assert lasted_s < 10 * BODY_S
    with connect(port) as client:
        client.sendall(HEAD + b"Content-Length: 90000\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_what_comes_after_an_early_answer_is_bounded_too(port: int) -> None:
    """A refusal for size comes before the body, which then is not read for ever."""
    with connect(port) as client:
        client.sendall(HEAD + b"Content-Length: 90000000000\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 413")
        assert trickle(client, b"a", 0.05) < 10 * BODY_S


@pytest.mark.parametrize(
    "flood",
    [
        b"POST /" + b"a" * 400_000,
        HEAD + b"X-A: b\r\n" * 50_000,
        HEAD + b"X-A: " + b"b" * 400_000,
        HEAD + b"X" * 400_000,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X-A: b\r\n" * 80_000,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1;" + b"x" * 600_000,
    ],
    ids=["url", "headers", "long value", "long name", "trailers", "chunk extension"],
)
def test_a_flood_of_bytes_that_are_no_body_is_cut_off(port: int, flood: bytes) -> None:
    with connect(port) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(flood)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while more := client.recv(1000):
                answer += more
    assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 408"))
    assert post(port, GOOD)[0] == 200


@pytest.mark.parametrize(
    "request_bytes",
    [b"nonsense\r\n\r\n", b"POST /v1/traces HTTP/9.9\r\n\r\n", HEAD + b"Content-Length: x\r\n\r\n"],
)
def test_what_is_no_http_is_400_with_a_status(port: int, request_bytes: bytes) -> None:
    with connect(port) as client:
        client.sendall(request_bytes)
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert (answer.status, answer.headers["content-type"]) == (400, "application/json")
        assert Parse(answer.read(), Status()).message == "Invalid HTTP request received."


def test_only_so_many_connections_are_held(port: int) -> None:
    crowd = [connect(port) for _ in range(MOST_CONNECTIONS)]
    time.sleep(0.2)
    with connect(port) as one_more:
        started = time.monotonic()
        assert is_closed(one_more)
        assert time.monotonic() - started < HEAD_S / 2
    for client in crowd:
        client.close()
    time.sleep(0.2)
    assert post(port, GOOD)[0] == 200


def test_a_client_that_resets_is_no_harm(port: int) -> None:
    for said in (b"", HEAD, HEAD + b"Content-Length: 900\r\n\r\nabc"):
        client = connect(port)
        client.sendall(said)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        client.close()
    assert post(port, GOOD)[0] == 200


def test_requests_one_after_another_and_in_chunks_on_one_connection(port: int) -> None:
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD
    pieces = b"".join(b"%x\r\n%s\r\n" % (1, GOOD[at : at + 1]) for at in range(len(GOOD)))
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
    with connect(port) as client:
        client.sendall(whole + chunked + whole)
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 3:
            answers += (more := client.recv(1000))
            assert more


def test_half_open_tcp_does_not_keep_the_collector_from_stopping(tmp_path: Path) -> None:
    crowd = []
    with serving(tmp_path) as bound:
        for address in (bound.http, bound.grpc, bound.metrics):
            crowd += [connect(address.port) for _ in range(5)]
        assert post(bound.http.port, GOOD)[0] == 200
        started = time.monotonic()
    assert time.monotonic() - started < 20
    for client in crowd:
        client.close()


def test_what_is_not_whole_when_the_collector_stops_may_be_sent_again(tmp_path: Path) -> None:
    with serving(tmp_path) as bound:
        client = connect(bound.http.port)
        client.sendall(HEAD + b"Content-Length: 900\r\n\r\nabc")
        assert post(bound.http.port, GOOD)[0] == 200
    answer = http.client.HTTPResponse(client)
    answer.begin()
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert Status.FromString(answer.read()).message == "the collector is stopping"
    client.close()


def test_a_connection_is_kept_between_exports(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for wait_s in (0, 3 * HEAD_S):  # idle is not slow
        time.sleep(wait_s)
        connection.request("POST", "/v1/traces", GOOD, PROTOBUF)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b"")
    connection.close()


def test_inflating_much_nothing_lets_others_have_their_turn() -> None:
    others_turns = 0

    async def others() -> None:
        nonlocal others_turns
        while True:
            others_turns += 1
            await asyncio.sleep(0)

    async def inflate(members: int) -> bytes:
        async def receive() -> dict[str, object]:
            return {"type": "http.request", "body": gzip.compress(b"") * members}

        meanwhile = asyncio.create_task(others())
        try:
            return await read_body(
                receive, 2**20, lambda _: None, announced_bytes=None, gzipped=True
            )
        finally:
            meanwhile.cancel()

    assert asyncio.run(inflate(1000)) == b""
    assert others_turns > 20
    with pytest.raises(Refusal, match="more than 1000 gzip members"):
        asyncio.run(inflate(1001))
