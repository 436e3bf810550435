"""OTLP over gRPC: gzip or none, bearer tokens, TLS, errors with google.rpc.Status details.

grpc reads the message of a unary method whole before the method runs. So Export is served as a
stream of one message, the same on the wire: it is read once its sender is known and there is room
for it, and until then flow control keeps it with its sender. (grpc's own limit,
`maximum_concurrent_rpcs`, would answer RESOURCE_EXHAUSTED without RetryInfo, after which OTLP
clients drop what they have.)
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from weakref import WeakValueDictionary

import grpc

from perfledger.collectors.forward.forward_target import FORWARDED_BY
from perfledger.collectors.otlp_rows import SIGNALS, Signal
from perfledger.collectors.transport.access import Access
from perfledger.collectors.transport.address import Address
from perfledger.collectors.transport.otlp_receiver import (
    READ_TIMEOUT_S,
    Refusal,
    Sink,
    answer,
    cannot_listen,
    defect,
    overloaded,
    read_within,
    reservation,
    undecodable,
)
from perfledger.collectors.transport.tls import TlsFiles

Context = grpc.aio.ServicerContext[bytes, bytes]

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_MOST_METADATA_BYTES = 16 * 2**10
# A peer that is gone, or does nothing, does not keep its connection.
_HANDSHAKE_MS, _PING_AFTER_MS, _PING_TIMEOUT_MS, _IDLE_MS = 10_000, 60_000, 20_000, 600_000
_MOST_CALLS_A_CONNECTION = 256
# Its calls may all be silent, and others' messages are not to wait for theirs.
_MOST_READ_A_CONNECTION = 2


def grpc_server(
    access: Access,
    address: Address,
    max_request_bytes: int,
    *,
    most_read_at_once: int,
    read_timeout_s: float = READ_TIMEOUT_S,
    tls: TlsFiles | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Return a server, not yet started, and the port that it is bound to (0 asks for a free one).

    The limit holds for a message before and after decompression; grpc answers RESOURCE_EXHAUSTED
    over it. So messages being read, which nothing has counted yet, hold at most
    `most_read_at_once` times the limit; others wait for their turn, for `read_timeout_s` at most,
    after which the message must be whole in the same time. Raises UsageError where the address
    cannot be bound.
    """
    turns = _Turns(most_read_at_once, read_timeout_s)

    async def read(context: Context) -> bytes:
        async with turns.turn(context.peer()), read_within(read_timeout_s):
            message = await context.read()
        if not isinstance(message, bytes):
            raise undecodable("the call ended without a message")
        return message

    server = grpc.aio.server(options=_options(max_request_bytes))
    server.add_generic_rpc_handlers([_service(signal, access, read) for signal in SIGNALS])
    try:
        if tls is None:
            return server, server.add_insecure_port(str(address))
        return server, server.add_secure_port(str(address), tls.grpc_credentials())
    except RuntimeError as error:
        raise cannot_listen(str(address), "--otlp-grpc") from error


class _Turns:
    """Lets only so many messages be read at once, and fewer of each connection."""

    def __init__(self, most_at_once: int, timeout_s: float) -> None:
        self._all = asyncio.Semaphore(most_at_once)
        self._timeout_s = timeout_s
        # A connection is known while a call of it waits or is read.
        self._of_peers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @asynccontextmanager
    async def turn(self, peer: str) -> AsyncIterator[None]:
        """Wait for a turn, first among the peer's own. Raises Refusal where it does not come."""
        own = self._of_peers.setdefault(peer, asyncio.Semaphore(_MOST_READ_A_CONNECTION))
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await held.enter_async_context(own)
                    await held.enter_async_context(self._all)
            except TimeoutError:
                raise overloaded("queue of messages to read") from None
            yield


def _options(max_request_bytes: int) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_metadata_size", _MOST_METADATA_BYTES),
        ("grpc.max_concurrent_streams", _MOST_CALLS_A_CONNECTION),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", _PING_AFTER_MS),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        # Otherwise a second collector on this port would silently take half of the requests.
        ("grpc.so_reuseport", 0),
    ]


def _service(
    signal: Signal, access: Access, read: Callable[[Context], Awaitable[bytes]]
) -> grpc.GenericRpcHandler:
    """Return the handler of one Export method. It sees bytes: decoding is the sink's."""

    async def export(_: AsyncIterator[bytes], context: Context) -> bytes:
        counts: Access | Sink = access
        try:
            counts = sink = access.sink(_metadata(context, "authorization"))
            hops = access.hops(_metadata(context, FORWARDED_BY))
            with reservation(sink) as take:
                body = await read(context)
                take(len(body))
                outcome = await sink.export(signal, body, hops)
                return bytes(answer(outcome).SerializeToString())
        except Refusal as refused:
            refusal = refused
        except grpc.aio.BaseError:
            raise  # the call or the server has ended, and nobody can be answered
        # The boundary: a defect of ours is answered, not shown.
        except Exception as error:
            refusal = defect(error)
        counts.refused(refusal)
        await context.abort(
            _CODES[refusal.code], refusal.message, trailing_metadata=_trailers(refusal)
        )

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(export)
    return grpc.method_handlers_generic_handler(signal.grpc_service, {"Export": method})


def _metadata(context: Context, name: str) -> str | None:
    """Return the value of one of the call's metadata."""
    for key, value in context.invocation_metadata() or ():
        if key == name:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


def _trailers(refusal: Refusal) -> tuple[tuple[str, bytes], ...]:
    """Return the details; Python's exporter reads RetryInfo from a trailer of its own."""
    details = ("grpc-status-details-bin", refusal.status().SerializeToString())
    if retry := refusal.retry_info():
        return (details, ("google.rpc.retryinfo-bin", retry.SerializeToString()))
    return (details,)
