"""An answer on its way to the client: whole or as server-sent events, until it is accepted.

Each request waits for its own client only. Every event is one write; the last bytes and the end of
the response are two, because a server waits for room in the socket before the next write, not
after: so the end is stamped when the last bytes were accepted.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from perfledger.instrumented_runtime.answer_text import AnswerText
from perfledger.instrumented_runtime.engine_link import Answer, RequestFailedError, Sampled
from perfledger.instrumented_runtime.faults.delays import plant
from perfledger.instrumented_runtime.openai_answers import (
    AnswerFormat,
    Finished,
    Usage,
    error_body,
    error_kind,
)
from perfledger.instrumented_runtime.openai_protocol import CompletionRequest
from perfledger.instrumented_runtime.request_trace import RequestTrace
from perfledger.schema.clocks import monotonic_ns

Headers = list[tuple[bytes, bytes]]
JSON_TYPE = (b"content-type", b"application/json")
EVENT_STREAM: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]
# LEAVE_REASONS of a request that the engine did not take, though it is a good one.
REFUSALS = frozenset({"deadline", "shed", "degraded"})
# A write that takes this long waited for the client to read; others take some tens of us.
UNREAD_NS = 1_000_000
# HTTP status of a request that the engine did not finish, by LEAVE_REASONS name; else 500.
STATUS_OF_REASON = {"shutdown": 503, "out_of_memory": 503, **dict.fromkeys(REFUSALS, 429)}


class Completion(Response):
    """The HTTP response to one request that the engine has."""

    def __init__(
        self,
        answer: Answer,
        texts: Sequence[AnswerText],  # one a choice
        asked: CompletionRequest,
        trace: RequestTrace,
        prompt_tokens: int,
        delays_ns: dict[str, int],
    ) -> None:
        super().__init__()
        self._answer = answer
        self._texts = texts
        self._stream = asked.stream
        self._trace = trace
        self._prompt_tokens = prompt_tokens
        self._delays_ns = delays_ns
        self._format = AnswerFormat(asked, trace.answer_id, trace.created_s)
        self._finishes: dict[int, str] = {}  # of the choices that have ended
        self._unread: list[tuple[int, int]] = []  # writes that waited for the client
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
            if failed.reason in REFUSALS and not self._started:
                self._trace.refused(failed.reason, failed.reason)
            else:
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
        sampled, text, finish = await self._next()  # a failure before it still has its HTTP status
        await self._start(send, 200, [*EVENT_STREAM, *self._told()])
        while len(self._finishes) < len(self._texts):
            if events := self._format.events(sampled.choice, text, finish):
                await self._write(send, events)
            sampled, text, finish = await self._next()
        ready_ns = await self._text_ready(sampled)
        with self._last_part(ready_ns):
            await plant(self._delays_ns, "stream")
            events = self._format.events(sampled.choice, text, finish)
            await self._send_last(send, events + self._format.ending(self._usage()))

    async def _send_whole(self, send: Send) -> None:
        pieces: list[list[str]] = [[] for _ in self._texts]
        while len(self._finishes) < len(self._texts):
            sampled, text, _ = await self._next()
            pieces[sampled.choice].append(text)
        ready_ns = await self._text_ready(sampled)
        with self._last_part(ready_ns):
            await plant(self._delays_ns, "stream")
            whole = [Finished("".join(pieces[i]), self._finishes[i]) for i in range(len(pieces))]
            body = self._format.whole(whole, self._usage())
            await self._start(send, 200, [JSON_TYPE, _length(body), *self._told()])
            await self._send_last(send, body)

    async def _next(self) -> tuple[Sampled, str, str | None]:
        """Wait for the next token; return it, the text it makes certain, and why its choice ends.

        A choice that hits a stop string ends here; what was sampled of it meanwhile is dropped.
        """
        sampled = await self._answer.next()
        while sampled.choice in self._finishes:
            sampled = await self._answer.next()
        text, finish = self._texts[sampled.choice].push(sampled.token, sampled.finish)
        if finish is not None:
            self._finishes[sampled.choice] = finish
            if sampled.finish is None:
                self._answer.end_choice(sampled.choice, "stop_string")
        return sampled, text, finish

    async def _write(self, send: Send, body: bytes) -> None:
        """Write a part of the answer, and note it where the client kept it waiting."""
        start_ns = monotonic_ns()
        await send(_body(body))
        end_ns = monotonic_ns()
        self._trace.first_chunk_written()
        if end_ns - start_ns >= UNREAD_NS:
            self._unread.append((start_ns, end_ns))

    async def _text_ready(self, last: Sampled) -> int:
        """All text is there: end `detokenize`, and return when.

        What the client did not read while the engine went on is written between: that is `stream`.
        """
        begin_ns = last.sent_ns
        try:
            await plant(self._delays_ns, "detokenize")
        finally:
            ready_ns = monotonic_ns()
            if late := [one for one in self._unread if one[1] > begin_ns]:
                first_ns = max(begin_ns, late[0][0])
                if first_ns > begin_ns:
                    self._trace.add_span("detokenize", begin_ns, first_ns)
                begin_ns = late[-1][1]
                self._trace.add_span("stream", first_ns, begin_ns, {"perfledger.reason": "unread"})
            self._trace.add_span("detokenize", begin_ns, ready_ns)
        return ready_ns

    async def _send_last(self, send: Send, body: bytes) -> None:
        await send(_body(body))
        self._trace.first_chunk_written()
        await send(_body(b"", more=False))

    @contextmanager
    def _last_part(self, ready_ns: int) -> Iterator[None]:
        """Record `stream` around the block; the request is answered where it was accepted."""
        try:
            yield
        finally:
            end_ns = monotonic_ns()
            self._trace.add_span("stream", ready_ns, end_ns)
        self._trace.ended(end_ns)
        self._trace.answered([self._finishes[choice] for choice in range(len(self._texts))])

    async def _explain(self, failed: RequestFailedError, send: Send) -> None:
        """Tell a client that is still there why there is no (more) answer."""
        if self._disconnected:
            return
        status = STATUS_OF_REASON.get(failed.reason, 500)
        kind = error_kind(500 if self._started else status)
        body = error_body(failed.detail or failed.reason, kind=kind, code=failed.reason)
        if self._started:
            body = b"data: " + body + b"\n\n"
        else:
            later = retry_after(failed.retry_after_s)
            await self._start(send, status, [JSON_TYPE, _length(body), *later, *self._told()])
        await send(_body(body, more=False))

    async def _start(self, send: Send, status: int, headers: Headers) -> None:
        self._started = True
        await send({"type": "http.response.start", "status": status, "headers": headers})

    def _told(self) -> Headers:
        """Return the headers that say which engine took the request, and what it made of it."""
        headers = [(b"x-perfledger-replica", self._trace.replica.encode())]
        admitted = self._answer.admitted
        if admitted is not None and admitted.degraded:
            headers.append((b"x-perfledger-degraded", admitted.degraded.encode()))
        return headers

    def _usage(self) -> Usage:
        admitted = self._answer.admitted
        cached_tokens = admitted.cached_tokens if admitted else 0
        return Usage(self._prompt_tokens, sum(one.tokens for one in self._texts), cached_tokens)


def retry_after(seconds: int | None) -> Headers:
    """Return the header that says when a refused request may come back, if that is known."""
    return [] if seconds is None else [(b"retry-after", str(seconds).encode())]


def _body(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


def _length(body: bytes) -> tuple[bytes, bytes]:
    return (b"content-length", str(len(body)).encode())
