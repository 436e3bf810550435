"""Streamed answers read from a socket by hand: begun, and left open as long as a test needs."""

import json
import socket
from typing import Any


def open_stream(url: str, body: dict[str, Any], *headers: str) -> socket.socket:
    """Start a streamed completion and read its first chunk."""
    content = json.dumps({**body, "stream": True}).encode()
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Connection: close", *headers]
    lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
    connection = socket.create_connection(address, timeout=120)
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + content)
    received = b""
    while b'"text":' not in received:
        received += connection.recv(65536)
    return connection


def rest_of(connection: socket.socket) -> str:
    """Read to the end of the connection, and close it."""
    received = b""
    with connection:
        while piece := connection.recv(65536):
            received += piece
    return received.decode()
