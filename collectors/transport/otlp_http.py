"""OTLP over HTTP, as an ASGI application: POST of protobuf or JSON, gzip or none.

Answers: 200 with the export response; 400 undecodable; 401 without a known token; 404, 405, 415;
408 where the body does not come in time; 413 over the limit; 503 with Retry-After while memory is
full. Every answer is in the encoding of the request, and that of every error a google.rpc.Status.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code

from perfledger.collectors.forward.forward_target import FORWARDED_BY
from perfledger.collectors.otlp_rows import SIGNALS, Signal
from perfledger.collectors.transport.access import Access
from perfledger.collectors.transport.cors import Cors, Headers
from perfledger.collectors.transport.http_body import DisconnectedError, Receive, read_body
from perfledger.collectors.transport.otlp_json import (
    MOST_VALUES,
    TooManyValuesError,
    UnreadableJsonError,
    to_protobuf,
)
from perfledger.collectors.transport.otlp_receiver import (
    READ_TIMEOUT_S,
    Refusal,
    Sink,
    answer,
    defect,
    read_within,
    reservation,
    stopping,
    too_many_values,
    undecodable,
)

Scope = dict[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
_SIGNALS = {signal.path: signal for signal in SIGNALS}


def http_app(
    access: Access,
    max_request_bytes: int,
    read_timeout_s: float = READ_TIMEOUT_S,
    cors: Cors | None = None,
) -> Application:
    """Return the application; a body may have `max_request_bytes` before and after inflating.

    It must be whole after `read_timeout_s`.
    """
    receiver = _Receiver(access, max_request_bytes, read_timeout_s)
    policy = cors or Cors()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name.decode("latin-1"): v.decode("latin-1") for name, v in scope["headers"]}
        preflight = policy.preflight(scope["method"], headers)
        if preflight is not None:
            return await _respond(send, 204, preflight, b"")
        extra = policy.answer(headers)
        try:
            request = _Request(scope["path"], scope["method"], headers)
            message = await receiver.export(request, receive)
        except DisconnectedError:
            return
        except Refusal as refusal:
            await _refuse(send, refusal, media_type(headers), extra)
        else:
            await _answer(send, 200, message, media_type(headers), extra)

    return app


def media_type(headers: Mapping[str, str]) -> str:
    """Return the content type without its parameters, in lower case."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


@dataclass(frozen=True)
class _Request:
    """What is known of a request before its body is read."""

    path: str
    method: str
    headers: Mapping[str, str]

    def signal(self) -> Signal:
        """Return the signal asked for. Raises Refusal for what needs no look at the body."""
        signal = _SIGNALS.get(self.path)
        if signal is None:
            known = ", ".join(_SIGNALS)
            raise Refusal(404, Code.UNIMPLEMENTED, f"there is nothing here; OTLP goes to {known}")
        if self.method != "POST":
            raise Refusal(405, Code.UNIMPLEMENTED, "OTLP is sent by POST")
        if media_type(self.headers) not in (PROTOBUF, JSON):
            raise Refusal(415, Code.INVALID_ARGUMENT, f"send {PROTOBUF} or {JSON}")
        if self.encoding not in ("identity", "gzip"):
            raise Refusal(415, Code.INVALID_ARGUMENT, "Content-Encoding may be gzip or absent")
        return signal

    @property
    def encoding(self) -> str:
        return self.headers.get("content-encoding", "").strip().lower() or "identity"

    @property
    def announced_bytes(self) -> int | None:
        length = self.headers.get("content-length", "")
        return int(length) if length.isdecimal() and len(length) < 20 else None


@dataclass(frozen=True)
class _Receiver:
    """Takes requests from their head to their acknowledgement."""

    access: Access
    max_request_bytes: int
    read_timeout_s: float
    # One at a time: a request's JSON is many times its size while it is read.
    reading_json: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "json"))

    async def export(self, request: _Request, receive: Receive) -> Message:
        """Return the response to a request that was taken. Raises Refusal, which is counted."""
        counts: Access | Sink = self.access
        try:
            counts = sink = self.access.sink(request.headers.get("authorization"))
            return await self._taken(sink, request.signal(), request, receive)
        except DisconnectedError:
            raise
        except Refusal as refusal:
            counts.refused(refusal)
            raise
        except asyncio.CancelledError:
            # The server ends and waits no longer; its client can try the next one.
            ended = stopping()
            counts.refused(ended)
            raise ended from None
        # The boundary: a defect of ours is answered, not shown.
        except Exception as error:
            ours = defect(error)
            counts.refused(ours)
            raise ours from None

    async def _taken(
        self, sink: Sink, signal: Signal, request: _Request, receive: Receive
    ) -> Message:
        hops = self.access.hops(request.headers.get(FORWARDED_BY))
        with reservation(sink) as take:
            async with read_within(self.read_timeout_s):
                body = await read_body(
                    receive,
                    self.max_request_bytes,
                    take,
                    announced_bytes=request.announced_bytes,
                    gzipped=request.encoding == "gzip",
                )
            if media_type(request.headers) == JSON:
                body = await self._from_json(signal, body)
                take(len(body))
            return answer(await sink.export(signal, body, hops))

    async def _from_json(self, signal: Signal, body: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self.reading_json, to_protobuf, signal.request, body)
        except UnreadableJsonError as error:
            raise undecodable(error.message, error.field) from None
        except TooManyValuesError:
            raise too_many_values(MOST_VALUES) from None


async def _refuse(send: Send, refusal: Refusal, asked_in: str, extra: Headers) -> None:
    headers = list(extra)
    if refusal.retry_s:
        headers.append((b"retry-after", str(refusal.retry_s).encode()))
    if refusal.http_status == 405:
        headers.append((b"allow", b"POST"))
    if refusal.http_status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="perfledger"'))
    await _answer(send, refusal.http_status, refusal.status(), asked_in, headers)


async def _answer(send: Send, status: int, message: Message, asked_in: str, extra: Headers) -> None:
    """Answer in the encoding of the request, or in JSON where it had none of the two."""
    if asked_in == PROTOBUF:
        body, content_type = message.SerializeToString(), PROTOBUF
    else:
        body, content_type = MessageToJson(message, indent=None).encode(), JSON
    await _respond(send, status, [(b"content-type", content_type.encode()), *extra], body)


async def _respond(send: Send, status: int, headers: Headers, body: bytes) -> None:
    length = [] if status == 204 else [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers + length})
    await send({"type": "http.response.body", "body": body})
