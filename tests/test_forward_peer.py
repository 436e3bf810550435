"""What a peer's answers mean over HTTP and gRPC, and what it is told."""

import asyncio
import random
import ssl
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from aiohttp import web
from debian_packages import program
from forward_servers import (
    HTTP,
    OWN_ID,
    forward_one,
    forward_to_http,
    forwarding,
    grpc_service,
    http_server,
    log_request,
    numbers,
    quick,
    request,
    settled,
    told,
    until,
)
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from otlp_client import span, traces
from otlp_messages import LOG_RECORDS, TRACES

from perfledger.collectors.forward.forward_target import FORWARDED_BY, ForwardTarget


def test_a_grpc_answer_without_end_is_not_read() -> None:
    with grpc_service(lambda _, __: bytes(8 * 2**20)) as port:
        assert forward_one(quick(port, "grpc")) == {
            "forward_offered": 1,
            "forward_dropped_refused": 1,
        }


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_http_statuses_that_are_retried(status: int) -> None:
    answers = [status, status, 200]
    counts, bodies = forward_to_http(lambda: web.Response(status=answers.pop(0)))
    assert counts == {"forward_offered": 1, "forwarded": 1, "forward_retries": 2}
    assert bodies == [[1]] * 3


@pytest.mark.parametrize("status", [204, 400, 401, 403, 404, 408, 413, 415, 500, 501, 508])
def test_http_statuses_that_are_final(status: int) -> None:
    counts, bodies = forward_to_http(lambda: web.Response(status=status))
    fate = "forwarded" if status == 204 else "forward_dropped_refused"
    assert counts == {"forward_offered": 1, fate: 1}
    assert bodies == [[1]]


RETRIED = ["CANCELLED", "DEADLINE_EXCEEDED", "ABORTED", "OUT_OF_RANGE", "UNAVAILABLE", "DATA_LOSS"]


@pytest.mark.parametrize("code", grpc.StatusCode)
def test_grpc_codes(code: grpc.StatusCode) -> None:
    calls = []

    def export(body: bytes, context: grpc.ServicerContext) -> bytes:
        calls.append(numbers(body))
        if len(calls) == 1 and code is not grpc.StatusCode.OK:
            context.abort(code, "as asked")
        return b""

    with grpc_service(export) as port:
        counts = forward_one(quick(port, "grpc"))
    if code.name in RETRIED:
        assert counts == {"forward_offered": 1, "forwarded": 1, "forward_retries": 1}
    else:
        fate = "forwarded" if code is grpc.StatusCode.OK else "forward_dropped_refused"
        assert counts == {"forward_offered": 1, fate: 1}
    assert calls == [[1]] * (2 if code.name in RETRIED else 1)


def retry_details(delay_s: float) -> tuple[str, bytes]:
    packed = AnyMessage()
    seconds, nanos = int(delay_s), round(delay_s % 1 * 1e9)
    packed.Pack(RetryInfo(retry_delay=Duration(seconds=seconds, nanos=nanos)))
    return "grpc-status-details-bin", Status(code=8, details=[packed]).SerializeToString()


def retry_trailer(delay_s: float) -> tuple[str, bytes]:
    retry = RetryInfo(retry_delay=Duration(nanos=round(delay_s * 1e9)))
    return "google.rpc.retryinfo-bin", retry.SerializeToString()


@pytest.mark.parametrize("trailer", [retry_details, retry_trailer])
@pytest.mark.parametrize("code", ["RESOURCE_EXHAUSTED", "UNAVAILABLE"])
def test_retry_info_is_honoured(trailer: Callable[[float], tuple[str, bytes]], code: str) -> None:
    times: list[float] = []

    def export(_: bytes, context: grpc.ServicerContext) -> bytes:
        times.append(time.monotonic())
        if len(times) == 1:
            context.set_trailing_metadata([trailer(0.6)])
            context.abort(grpc.StatusCode[code], "later")
        return b""

    with grpc_service(export) as port:
        counts = forward_one(quick(port, "grpc"))
    assert counts == {"forward_offered": 1, "forwarded": 1, "forward_retries": 1}
    assert times[1] - times[0] >= 0.59


def test_a_damaged_retry_info_is_none() -> None:
    def export(_: bytes, context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata([("grpc-status-details-bin", b"\xff\xff\xff")])
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
        return b""

    with grpc_service(export) as port:
        counts = forward_one(quick(port, "grpc"))
    assert counts == {"forward_offered": 1, "forward_dropped_refused": 1}


def test_what_a_peer_did_not_take_in_part_is_counted_and_not_sent_again() -> None:
    partial = ExportTracePartialSuccess(rejected_spans=3, error_message="no")
    answer = ExportTraceServiceResponse(partial_success=partial).SerializeToString()
    expected = {"forward_offered": 1, "forwarded": 1, "forward_rejected": 3}
    counts, bodies = forward_to_http(lambda: web.Response(body=answer))
    assert (counts, bodies) == (expected, [[1]])
    with grpc_service(lambda _, __: answer) as port:
        assert forward_one(quick(port, "grpc")) == expected


def test_a_warning_and_a_negative_count_reject_nothing() -> None:
    for rejected in (0, -5):
        partial = ExportTracePartialSuccess(rejected_spans=rejected, error_message="careful")
        answer = ExportTraceServiceResponse(partial_success=partial).SerializeToString()
        with grpc_service(lambda _, __, answer=answer: answer) as port:
            assert forward_one(quick(port, "grpc")) == {"forward_offered": 1, "forwarded": 1}


def test_a_large_request_in_gzip_stops_nothing_else() -> None:
    body = b"".join(traces(span(n, name=random.Random(n).randbytes(8).hex())) for n in range(1, 9))
    large = body + traces(*(span(n, name="x" * 1000) for n in range(9, 9000)))

    def export(received: bytes, _: grpc.ServicerContext) -> bytes:
        assert received == large
        return b""

    with grpc_service(export) as port:
        target = quick(port, "grpc", compression="gzip", timeout_s=30.0)
        assert forward_one(target, large) == {"forward_offered": 1, "forwarded": 1}


def test_headers_are_sent_and_the_way_is_told() -> None:
    seen = []

    async def handle(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers))
        return web.Response()

    async def forward() -> None:
        async with http_server(handle) as port:
            target = quick(port, headers=(("authorization", "Bearer t"),))
            target = replace(target, endpoint=f"{target.endpoint}/otlp")
            async with forwarding(target) as forwarder:
                forwarder.offer(LOG_RECORDS, log_request(), ("b" * 16,))
                await until(lambda: settled(forwarder))

    asyncio.run(forward())
    ((path, headers),) = seen
    assert path == "/otlp/v1/logs"
    wanted = ("authorization", FORWARDED_BY, "Content-Type", "Accept-Encoding")
    assert [headers[name] for name in wanted] == [
        "Bearer t",
        f"{'b' * 16},{OWN_ID}",
        "application/x-protobuf",
        "identity",
    ]


def test_grpc_headers_are_metadata() -> None:
    seen: list[dict[str, str | bytes]] = []

    def export(_: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append(dict(context.invocation_metadata()))
        return b""

    with grpc_service(export) as port:
        forward_one(quick(port, "grpc", headers=(("x-scope-orgid", "team-a"),)))
    assert (seen[0]["x-scope-orgid"], seen[0][FORWARDED_BY]) == ("team-a", OWN_ID)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = [program("openssl"), "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=peer", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.mark.parametrize("protocol", ["grpc", HTTP])
def test_tls_with_its_own_authority(certificate: tuple[Path, Path], protocol: str) -> None:
    cert, key = certificate

    async def take(_: web.Request) -> web.Response:
        return web.Response()

    async def forward(port: int) -> None:
        settings = {"endpoint": f"https://127.0.0.1:{port}", "protocol": protocol}
        trusting = ForwardTarget.from_toml({**settings, "ca_file": str(cert)})
        async with forwarding(trusting) as forwarder:
            forwarder.offer(TRACES, request(1))
            await until(lambda: settled(forwarder))
        assert told(forwarder) == {"forward_offered": 1, "forwarded": 1}
        strange = replace(ForwardTarget.from_toml(settings), max_age_s=0.5, first_retry_s=0.05)
        async with forwarding(strange) as forwarder:
            forwarder.offer(TRACES, request(2))
            await until(lambda: settled(forwarder))
        assert told(forwarder, "forward_retries") == {
            "forward_offered": 1,
            "forward_dropped_old": 1,
        }

    async def over_http() -> None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(cert, key)
        async with http_server(take, context) as port:
            await forward(port)

    if protocol == HTTP:
        asyncio.run(over_http())
        return
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    with grpc_service(lambda _, __: b"", credentials) as port:
        asyncio.run(forward(port))
