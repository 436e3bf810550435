"""An answer on its way to the client: whole or as server-sent events, until it is accepted.

Each request waits for its own client only. Every event is one write; the last bytes and the end of
the response are two, because a server waits for room in the socket before the next write, not
after: so the end is stamped when the last bytes were accepted.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from perfledger.instrumented_runtime.answer_text import AnswerText
from perfledger.instrumented_runtime.engine_link import Answer, RequestFailedError, Sampled
from perfledger.instrumented_runtime.faults.delays import plant
from perfledger.instrumented_runtime.openai_protocol import (
    AnswerFormat,
    CompletionRequest,
    Usage,
    error_body,
)
from perfledger.instrumented_runtime.request_trace import RequestTrace
from perfledger.schema.clocks import monotonic_ns

Headers = list[tuple[bytes, bytes]]
JSON_TYPE = (b"content-type", b"application/json")
EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
# HTTP status of a request that the engine did not finish, by LEAVE_REASONS name; else 500.
STATUS_OF_REASON = {"shutdown": 503, "out_of_memory": 503}


class Completion(Response):
    """The HTTP response to one request that the engine has."""

    def __init__(
        self,
        answer: Answer,
        text: AnswerText,
        asked: CompletionRequest,
        trace: RequestTrace,
        prompt_tokens: int,
        delays_ns: dict[str, int],
    ) -> None:
        super().__init__()
        self._answer = answer
        self._text = text
        self._stream = asked.stream
        self._trace = trace
        self._prompt_tokens = prompt_tokens
        self._delays_ns = delays_ns
        self._format = AnswerFormat(asked, trace.answer_id, trace.created_s)
        self._started = False
        self._disconnected = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer as ASGI messages; a client that leaves ends the request at once."""
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await (self._send_stream(send) if self._stream else self._send_whole(send))
            if self._disconnected:
                self._trace.failed("client_disconnect")
        except RequestFailedError as failed:
            self._trace.failed(failed.reason)
            await self._explain(failed, send)
        except asyncio.CancelledError:
            self._trace.failed("shutdown")
            self._answer.abort("shutdown")
            raise
        finally:
            watcher.cancel()
            self._answer.abort("error")  # only where an unforeseen error left it running
            self._trace.counted(self._usage())

    async def _watch(self, receive: Receive) -> None:
        """Wait for the client to leave (servers say so through `receive`)."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        self._answer.abort("client_disconnect")

    async def _send_stream(self, send: Send) -> None:
        sampled = await self._answer.next()  # a failure before it still has its HTTP status
        await self._start(send, 200, EVENT_STREAM)
        opening = self._format.opening()
        text, finish = self._text.push(sampled.token, sampled.finish)
        while finish is None:
            if text:
                await send(_body(opening + self._format.text(text)))
                self._trace.first_chunk_written()
                opening = b""
            sampled = await self._answer.next()
            text, finish = self._text.push(sampled.token, sampled.finish)
        ready_ns = await self._text_ready(sampled)
        with self._last_part(ready_ns, finish):
            await plant(self._delays_ns, "stream")
            closing = self._format.closing(finish, self._usage())
            await self._send_last(send, opening + self._format.text(text) + closing)

    async def _send_whole(self, send: Send) -> None:
        pieces, finish = [], None
        while finish is None:
            sampled = await self._answer.next()
            text, finish = self._text.push(sampled.token, sampled.finish)
            pieces.append(text)
        ready_ns = await self._text_ready(sampled)
        with self._last_part(ready_ns, finish):
            await plant(self._delays_ns, "stream")
            body = self._format.whole("".join(pieces), finish, self._usage())
            await self._start(send, 200, [JSON_TYPE, _length(body)])
            await self._send_last(send, body)

    async def _text_ready(self, last: Sampled) -> int:
        """All text is there: end `detokenize`, and return when."""
        if last.finish is None:
            self._answer.abort("stop_string")
        try:
            await plant(self._delays_ns, "detokenize")
        finally:
            ready_ns = monotonic_ns()
            self._trace.add_span("detokenize", last.sent_ns, ready_ns)
        return ready_ns

    async def _send_last(self, send: Send, body: bytes) -> None:
        await send(_body(body))
        self._trace.first_chunk_written()
        await send(_body(b"", more=False))

    @contextmanager
    def _last_part(self, ready_ns: int, finish: str) -> Iterator[None]:
        """Record `stream` around the block; the request is answered where it was accepted."""
        try:
            yield
        finally:
            end_ns = monotonic_ns()
            self._trace.add_span("stream", ready_ns, end_ns)
        self._trace.ended(end_ns)
        self._trace.answered(finish)

    async def _explain(self, failed: RequestFailedError, send: Send) -> None:
        """Tell a client that is still there why there is no (more) answer."""
        if self._disconnected:
            return
        body = error_body(failed.detail or failed.reason, kind="server_error", code=failed.reason)
        if self._started:
            body = b"data: " + body + b"\n\n"
        else:
            status = STATUS_OF_REASON.get(failed.reason, 500)
            await self._start(send, status, [JSON_TYPE, _length(body)])
        await send(_body(body, more=False))

    async def _start(self, send: Send, status: int, headers: Headers) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": status, "headers": headers})

    def _usage(self) -> Usage:
        return Usage(self._prompt_tokens, self._text.tokens, 0)


def _body(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _length(body: bytes) -> tuple[bytes, bytes]:
    return (b"content-length", str(len(body)).encode())
