"""OTLP over gRPC: gzip or none, errors with google.rpc.Status details."""

import grpc

from perfledger.collectors.address import Address
from perfledger.collectors.otlp_receiver import Refusal, Sink, cannot_listen, reservation
from perfledger.collectors.otlp_rows import SIGNALS, Signal

_CODES = {code.value[0]: code for code in grpc.StatusCode}


def grpc_server(
    sink: Sink, address: Address, max_request_bytes: int
) -> tuple[grpc.aio.Server, int]:
    """Return a server, not yet started, and the port that it is bound to (0 asks for a free one).

    The limit holds for a message before and after decompression; grpc answers RESOURCE_EXHAUSTED
    over it. Raises UsageError where the address cannot be bound.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", max_request_bytes),
            # Otherwise a second collector on this port would silently take half of the requests.
            ("grpc.so_reuseport", 0),
        ]
    )
    server.add_generic_rpc_handlers([_service(signal, sink) for signal in SIGNALS])
    try:
        return server, server.add_insecure_port(str(address))
    except RuntimeError as error:
        raise cannot_listen(str(address), "--otlp-grpc") from error


def _service(signal: Signal, sink: Sink) -> grpc.GenericRpcHandler:
    """Return the handler of one Export method. It sees bytes: decoding is the sink's."""

    async def export(body: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        try:
            with reservation(sink) as take:
                take(len(body))
                decoded = await sink.export(signal, body)
        except Refusal as refusal:
            sink.refused(refusal)
            await context.abort(
                _CODES[refusal.code], refusal.message, trailing_metadata=_trailers(refusal)
            )
        return decoded.response()

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(export)
    return grpc.method_handlers_generic_handler(signal.grpc_service, {"Export": method})


def _trailers(refusal: Refusal) -> tuple[tuple[str, bytes], ...]:
    """Return the details; Python's exporter reads RetryInfo from a trailer of its own."""
    details = ("grpc-status-details-bin", refusal.status().SerializeToString())
    if retry := refusal.retry_info():
        return (details, ("google.rpc.retryinfo-bin", retry.SerializeToString()))
    return (details,)
