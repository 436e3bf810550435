"""An ASGI server for strangers: uvicorn, with bounds on how many connect and how long they take.

uvicorn itself lets a client connect and say nothing, or send its head byte by byte, for ever. Here
a connection has a deadline for its head and one for its body, a limit for both in bytes, and there
are only so many connections.
"""

import asyncio
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from google.protobuf.json_format import MessageToJson
from google.rpc.code_pb2 import Code
from google.rpc.status_pb2 import Status
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from perfledger.collectors.transport.address import Address
from perfledger.collectors.transport.otlp_http import Application
from perfledger.collectors.transport.otlp_receiver import READ_TIMEOUT_S, cannot_listen

_MOST_HEAD_BYTES = 64 * 2**10
# A body is handed to its reader in pieces of this size: each wakes a task, which costs as much as
# copying a quarter of it.
_HAND_OVER_BYTES = 256 * 2**10
# Chunked bodies come with some bytes beside their content.
_FRAMING = 2
_HANDSHAKE_S = 10
_TICKS_A_SWEEP = 10  # uvicorn ticks ten times a second


@dataclass(frozen=True)
class ConnectionLimits:
    """What one server's connections may take; a body has twice the time that its reader gives."""

    connections: int = 1000
    body_bytes: int = 2**20
    head_s: float = 10.0
    body_s: float = 2 * READ_TIMEOUT_S
    idle_s: int = 75


class WebServer(uvicorn.Server):
    """Serves one application on one socket; leaves signals to whoever runs the loop."""

    def __init__(
        self, app: Application, limits: ConnectionLimits, tls: ssl.SSLContext | None, grace_s: int
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=HttpToolsProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=limits.idle_s,
                timeout_graceful_shutdown=grace_s,
            )
        )
        self._limits = limits
        self._tls = tls

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on the sockets given, with a bound on how long a TLS handshake takes."""
        loop = asyncio.get_running_loop()
        handshake_s = _HANDSHAKE_S if self._tls else None
        self.servers = [
            await loop.create_server(
                self._connection, sock=sock, ssl=self._tls, ssl_handshake_timeout=handshake_s
            )
            for sock in sockets or []
        ]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Close the connections that are past their deadline."""
        if counter % _TICKS_A_SWEEP == 0:
            now = asyncio.get_running_loop().time()
            for connection in list(self.server_state.connections):
                if isinstance(connection, _Connection) and connection.deadline < now:
                    connection.transport.abort()
        return await super().on_tick(counter)

    def _connection(self) -> asyncio.Protocol:
        return _Connection(self._limits, config=self.config, server_state=self.server_state)


class _Connection(HttpToolsProtocol):
    """One client's connection, under limits. (The `on_…` methods are the HTTP parser's calls.)"""

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options, app_state={})
        self._limits = limits
        self._has_head = False
        self._received_bytes = 0
        self._pieces: list[bytes] = []
        self._gathered_bytes = 0
        self.deadline = float("inf")

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._limits.connections:
            self.transport = transport
            transport.abort()
            return
        super().connection_made(transport)
        self.deadline = self.loop.time() + self._limits.head_s

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.deadline = float("inf")

    def data_received(self, data: bytes) -> None:
        self._received_bytes += len(data)
        super().data_received(data)
        if self._received_bytes > self._most_bytes():
            self.transport.abort()

    def _most_bytes(self) -> int:
        body_bytes = _FRAMING * self._limits.body_bytes if self._has_head else 0
        return _MOST_HEAD_BYTES + body_bytes

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._pieces, self._gathered_bytes = [], 0
        self._has_head, self._received_bytes = False, 0
        self.deadline = self.loop.time() + self._limits.head_s

    def on_header(self, name: bytes, value: bytes) -> None:
        # What follows a body in chunks, headers too, is nothing to us.
        if not self._has_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._has_head = True
        self.deadline = self.loop.time() + self._limits.body_s
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._gathered_bytes += len(body)
        if self._gathered_bytes >= _HAND_OVER_BYTES:
            self._hand_over()

    def on_message_complete(self) -> None:
        self.deadline = float("inf")
        self._hand_over()
        super().on_message_complete()

    def _hand_over(self) -> None:
        if self._pieces:
            super().on_body(b"".join(self._pieces))
            self._pieces, self._gathered_bytes = [], 0

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; like every refusal as a google.rpc.Status."""
        status = Status(code=Code.INVALID_ARGUMENT, message=msg)
        body = MessageToJson(status, indent=None).encode()
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        )
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


def listen(address: Address, flag: str) -> socket.socket:
    """Return a listening socket. Raises UsageError, which names the flag."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise cannot_listen(str(address), flag) from error
