"""OTLP over gRPC: gzip or none, errors with google.rpc.Status details.

grpc reads the message of a unary method whole before the method runs. So Export is served as a
stream of one message, the same on the wire: it is read once there is room for it, and until then
flow control keeps it with its sender. (grpc's own limit, `maximum_concurrent_rpcs`, would answer
RESOURCE_EXHAUSTED without RetryInfo, after which OTLP clients drop what they have.)
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import grpc

from perfledger.collectors.address import Address
from perfledger.collectors.otlp_receiver import (
    READ_TIMEOUT_S,
    Refusal,
    Sink,
    cannot_listen,
    read_within,
    reservation,
    undecodable,
)
from perfledger.collectors.otlp_rows import SIGNALS, Signal

Context = grpc.aio.ServicerContext[bytes, bytes]

_CODES = {code.value[0]: code for code in grpc.StatusCode}


def grpc_server(
    sink: Sink,
    address: Address,
    max_request_bytes: int,
    *,
    most_read_at_once: int,
    read_timeout_s: float = READ_TIMEOUT_S,
) -> tuple[grpc.aio.Server, int]:
    """Return a server, not yet started, and the port that it is bound to (0 asks for a free one).

    The limit holds for a message before and after decompression; grpc answers RESOURCE_EXHAUSTED
    over it. So messages being read, which nothing has counted yet, hold at most
    `most_read_at_once` times the limit; others wait for their turn. Each must be whole after
    `read_timeout_s`. Raises UsageError where the address cannot be bound.
    """
    turns = asyncio.Semaphore(most_read_at_once)

    async def read(context: Context) -> bytes:
        async with turns, read_within(read_timeout_s):
            message = await context.read()
        if not isinstance(message, bytes):
            raise undecodable("the call ended without a message")
        return message

    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max_request_bytes),
            # Otherwise a second collector on this port would silently take half of the requests.
            ("grpc.so_reuseport", 0),
        ]
    )
    server.add_generic_rpc_handlers([_service(signal, sink, read) for signal in SIGNALS])
    try:
        return server, server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise cannot_listen(str(address), "--otlp-grpc") from error


def _service(
    signal: Signal, sink: Sink, read: Callable[[Context], Awaitable[bytes]]
) -> grpc.GenericRpcHandler:
    """Return the handler of one Export method. It sees bytes: decoding is the sink's."""

    async def export(_: AsyncIterator[bytes], context: Context) -> bytes:
        try:
            with reservation(sink) as take:
                body = await read(context)
                take(len(body))
                decoded = await sink.export(signal, body)
        except Refusal as refusal:
            sink.refused(refusal)
            await context.abort(
                _CODES[refusal.code], refusal.message, trailing_metadata=_trailers(refusal)
            )
        return decoded.response()

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(export)
    return grpc.method_handlers_generic_handler(signal.grpc_service, {"Export": method})


def _trailers(refusal: Refusal) -> tuple[tuple[str, bytes], ...]:
    """Return the details; Python's exporter reads RetryInfo from a trailer of its own."""
    details = ("grpc-status-details-bin", refusal.status().SerializeToString())
    if retry := refusal.retry_info():
        return (details, ("google.rpc.retryinfo-bin", retry.SerializeToString()))
    return (details,)
