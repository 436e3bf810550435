"""OTLP over HTTP, as an ASGI application: POST of protobuf, gzip or none.

Answers: 200 with the export response; 400 undecodable; 404, 405, 415; 408 where the body does not
come in time; 413 over the limit; 503 with Retry-After while memory is full. Every error's body is a
google.rpc.Status in the encoding of the request. JSON requests get 415 for
now: OTLP's JSON is not protobuf's, and nothing is guessed.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from google.protobuf.json_format import MessageToJson
from google.rpc.code_pb2 import Code

from perfledger.collectors.otlp_receiver import (
    READ_TIMEOUT_S,
    Refusal,
    Sink,
    read_within,
    reservation,
    too_large,
    undecodable,
)
from perfledger.collectors.otlp_rows import SIGNALS, Signal

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
_INFLATE_AT_ONCE_BYTES = 2**20
_GZIP = zlib.MAX_WBITS | 16
_SIGNALS = {signal.path: signal for signal in SIGNALS}


class Disconnected(Exception):
    """The client went away before its request was whole."""


def http_app(
    sink: Sink, max_request_bytes: int, read_timeout_s: float = READ_TIMEOUT_S
) -> Application:
    """Return the application; a body may have `max_request_bytes` before and after inflating.

    It must be whole after `read_timeout_s`.
    """

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        signal = _SIGNALS.get(scope["path"])
        try:
            asked = _asked(signal, scope["method"], headers)
            with reservation(sink) as take:
                async with read_within(read_timeout_s):
                    body = await _body(receive, headers, max_request_bytes, take)
                answer = (await sink.export(asked, body)).response()
        except Disconnected:
            return
        except Refusal as refusal:
            sink.refused(refusal)
            await _refuse(send, refusal, media_type(headers))
        else:
            await _respond(send, 200, PROTOBUF, answer)

    return app


def media_type(headers: dict[str, str]) -> str:
    """Return the content type without its parameters, in lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _asked(signal: Signal | None, method: str, headers: dict[str, str]) -> Signal:
    """Return the signal asked for. Raises Refusal for what needs no look at the body."""
    if signal is None:
        known = ", ".join(_SIGNALS)
        raise Refusal(404, Code.UNIMPLEMENTED, f"there is nothing here; OTLP goes to {known}")
    if method != "POST":
        raise Refusal(405, Code.UNIMPLEMENTED, "OTLP is sent by POST")
    if media_type(headers) != PROTOBUF:
        raise Refusal(415, Code.INVALID_ARGUMENT, f"send {PROTOBUF}; no other type is read")
    if _encoding(headers) not in ("identity", "gzip"):
        raise Refusal(415, Code.INVALID_ARGUMENT, "Content-Encoding may be gzip or absent")
    return signal


def _encoding(headers: dict[str, str]) -> str:
    return headers.get("content-encoding", "").strip().lower() or "identity"


async def _body(
    receive: Receive, headers: dict[str, str], limit_bytes: int, take: Callable[[int], None]
) -> bytes:
    """Return the body, inflated. Raises Refusal over the limits or where it is damaged."""
    chunks = _received(receive)
    if _encoding(headers) == "gzip":
        chunks = _inflated(chunks, limit_bytes)
    body = bytearray()
    async for chunk in chunks:
        take(len(chunk))
        body += chunk
        if len(body) > limit_bytes:
            raise too_large(limit_bytes)
    return bytes(body)


async def _received(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. Raises Disconnected."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return


async def _inflated(chunks: AsyncIterator[bytes], limit_bytes: int) -> AsyncIterator[bytes]:
    """Yield the content of a gzip stream (of several members too) piece by piece.

    A piece is bounded however well it was compressed, so that a bomb is met at the limit. The
    compressed bytes have the same limit.
    """
    member, compressed_bytes, whole = zlib.decompressobj(_GZIP), 0, False
    async for chunk in chunks:
        compressed_bytes += len(chunk)
        if compressed_bytes > limit_bytes:
            raise too_large(limit_bytes)
        while chunk:
            try:
                yield member.decompress(chunk, _INFLATE_AT_ONCE_BYTES)
            except zlib.error as error:
                raise undecodable("the body is not gzip, or damaged") from error
            await asyncio.sleep(0)
            whole, chunk = member.eof, member.unused_data or member.unconsumed_tail
            if whole:
                member = zlib.decompressobj(_GZIP)
    if not whole:
        raise undecodable("the gzip stream ends early")


async def _refuse(send: Send, refusal: Refusal, asked_in: str) -> None:
    status = refusal.status()
    extra = [(b"retry-after", str(refusal.retry_s).encode())] if refusal.retry_s else []
    if refusal.http_status == 405:
        extra.append((b"allow", b"POST"))
    if asked_in == PROTOBUF:
        await _respond(send, refusal.http_status, PROTOBUF, status.SerializeToString(), extra)
    else:
        text = MessageToJson(status, indent=None).encode()
        await _respond(send, refusal.http_status, JSON, text, extra)


async def _respond(
    send: Send,
    status: int,
    content_type: str,
    body: bytes,
    extra_headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % len(body))]
    headers += extra_headers or []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
