"""uvicorn, set up for this runtime: exact ends, our own signals, limits."""

import asyncio
import contextlib
import resource
import socket
from collections.abc import Generator
from typing import cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from perfledger.schema.errors import UsageError

GRACEFUL_STOP_S = 5
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they close first
MAX_HEADER_BYTES = 32 * 1024
BACKLOG = 1024
MAX_OPEN_FILES = 16_384
# The kernel would take up to 4 MB for a client that reads nothing, and its answer would seem to
# have arrived. Enough for 600 KB/s over 100 ms of round trip (the kernel doubles it).
SEND_BUFFER_BYTES = 32 * 1024


class ExactProtocol(H11Protocol):
    """Waits before each write until the socket has accepted all earlier ones.

    By default 64 KiB may wait in the process, and a response would seem to end before it did.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        # Close a connection that never sends; the first bytes cancel it.
        self.timeout_keep_alive_task = self.loop.call_later(
            KEEP_ALIVE_S, self.timeout_keep_alive_handler
        )


class Server(uvicorn.Server):
    """A server whose process handles signals itself: `should_exit` ends it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture none."""
        yield


def build_server(app: ASGIApp) -> Server:
    """Return a server for an application; run it by `serve(sockets=[…])`."""
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", ExactProtocol),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACEFUL_STOP_S,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=BACKLOG,
    )
    return Server(config)


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UsageError where the address cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}: {error.strerror}", where="--host") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)  # inherited
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}",
            fix="another --port, or end the process that has it (ss -ltnp shows it)",
        ) from error
    return listener


def raise_file_limit() -> None:
    """Allow as many open connections as the system lets us, up to MAX_OPEN_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def url_of(listener: socket.socket) -> str:
    """Return the URL that a listening socket is reached by."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
