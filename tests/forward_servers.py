"""Peers that forwarding is tested with, and how to look at what became of requests."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

import grpc
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from otlp_client import TRACE_SERVICE, span, traces
from otlp_messages import LOG_RECORDS, METRICS, TRACES

from perfledger.collectors.forward.forward_target import ForwardTarget
from perfledger.collectors.forward.forwarding import Forwarder

OWN_ID = "a" * 16


HTTP = "http/protobuf"


def quick(port: int, protocol: str = HTTP, **changes: object) -> ForwardTarget:
    """A target that fails and tries again fast."""
    target = ForwardTarget(
        f"http://127.0.0.1:{port}",
        protocol,
        first_retry_s=0.02,
        last_retry_s=0.1,
        timeout_s=1.0,
        drain_s=1.0,
    )
    return replace(target, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def forwarding(target: ForwardTarget) -> AsyncIterator[Forwarder]:
    forwarder, stop = Forwarder(target, OWN_ID), asyncio.Event()
    running = asyncio.create_task(forwarder.run(stop))
    await asyncio.sleep(0)
    try:
        yield forwarder
    finally:
        stop.set()
        await running
        assert_all_accounted(forwarder)


def assert_all_accounted(forwarder: Forwarder) -> None:
    counts = forwarder.counts()
    dropped = sum(count for name, count in counts.items() if name.startswith("forward_dropped"))
    assert counts["forward_offered"] == counts["forwarded"] + dropped + counts["forward_waiting"]
    if not counts["forward_waiting"]:
        assert counts["forward_queue_bytes"] == 0
        assert forwarder.oldest_s() == 0.0


async def until(ready: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def settled(forwarder: Forwarder) -> bool:
    return forwarder.counts()["forward_waiting"] == 0


def told(forwarder: Forwarder, *without: str) -> dict[str, int]:
    """The counts that are not 0."""
    return {name: n for name, n in forwarder.counts().items() if n and name not in without}


def request(number: int) -> bytes:
    return traces(span(number))


def numbers(body: bytes) -> list[int]:
    """The spans in a request, as `request` numbered them."""
    message = ExportTraceServiceRequest.FromString(body)
    return [
        int.from_bytes(one.span_id, "big")
        for group in message.resource_spans
        for scope in group.scope_spans
        for one in scope.spans
    ]


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def http_server(handler: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    app = web.Application(client_max_size=2**26)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


Export = Callable[[bytes, grpc.ServicerContext], bytes]


@contextmanager
def grpc_service(
    export: Export, credentials: grpc.ServerCredentials | None = None
) -> Iterator[int]:
    options = [("grpc.max_receive_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(8), options=options)
    handler = grpc.unary_unary_rpc_method_handler(export)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(TRACE_SERVICE, {"Export": handler})]
    )
    address = "127.0.0.1:0"
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    server.start()
    try:
        yield port
    finally:
        server.stop(0).wait()


def metric_request() -> bytes:
    request = METRICS.request()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="queue_depth")
    metric.gauge.data_points.add(time_unix_nano=time.time_ns(), as_int=3)
    return bytes(request.SerializeToString())


def log_request() -> bytes:
    request = LOG_RECORDS.request()
    record = request.resource_logs.add().scope_logs.add().log_records.add(severity_number=9)
    record.time_unix_nano = time.time_ns()
    return bytes(request.SerializeToString())


def forward_one(target: ForwardTarget, body: bytes | None = None) -> dict[str, int]:
    async def forward() -> dict[str, int]:
        async with forwarding(target) as forwarder:
            forwarder.offer(TRACES, body or request(1))
            await until(lambda: settled(forwarder))
        return told(forwarder)

    return asyncio.run(forward())


def forward_to_http(answer: Callable[[], web.Response]) -> tuple[dict[str, int], list[list[int]]]:
    bodies = []

    async def handle(request: web.Request) -> web.Response:
        bodies.append(numbers(await request.read()))
        return answer()

    async def forward() -> dict[str, int]:
        async with http_server(handle) as port, forwarding(quick(port)) as forwarder:
            forwarder.offer(TRACES, request(1))
            await until(lambda: settled(forwarder))
            return told(forwarder)

    return asyncio.run(forward()), bodies
