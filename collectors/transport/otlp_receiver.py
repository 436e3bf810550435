"""What both OTLP transports share: where requests go, and how one is refused.

A refusal has one meaning and two spellings: a gRPC status and an HTTP status whose body is the
same google.rpc.Status (OTLP 1.11, "Failures"). Only what is worth retrying says after how long.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Protocol

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

from perfledger.collectors.defects import tell_defect
from perfledger.collectors.otlp_rows import Outcome, Signal
from perfledger.schema.errors import UsageError

log = logging.getLogger("perfledger.collect")
DEFAULT_MAX_REQUEST_BYTES = 64 * 2**20
RETRY_AFTER_S = 1
# A request holds memory while it is read; a sender that stalls must not hold it for ever.
READ_TIMEOUT_S = 30.0
# Of a partial success, in characters; OTLP lets a client ignore responses over 4 MiB.
LONGEST_MESSAGE = 4096


class Refusal(Exception):
    """A request that is not taken.

    `retry_s` is set where the same bytes may pass later; `field` is what is wrong with a 400.
    """

    def __init__(
        self,
        http_status: int,
        code: int,
        message: str,
        *,
        retry_s: int | None = None,
        field: str = "body",
    ) -> None:
        super().__init__(message)
        self.http_status = http_status
        self.code = code
        self.message = message
        self.retry_s = retry_s
        self.field = field

    def status(self) -> Status:
        """Return the body that says so."""
        status = Status(code=self.code, message=self.message)
        for detail in self._details():
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        return status

    def retry_info(self) -> RetryInfo | None:
        """Return when to try again, or None where that is of no use."""
        if self.retry_s is None:
            return None
        return RetryInfo(retry_delay=Duration(seconds=self.retry_s))

    def _details(self) -> list[Message]:
        if retry := self.retry_info():
            return [retry]
        if self.http_status == 400:
            violation = BadRequest.FieldViolation(field=self.field, description=self.message)
            return [BadRequest(field_violations=[violation])]
        return []


def undecodable(message: str, field: str = "body") -> Refusal:
    """Return the refusal of bytes that are no request: 400, INVALID_ARGUMENT."""
    return Refusal(400, Code.INVALID_ARGUMENT, message, field=field)


def too_many_values(most: int) -> Refusal:
    """Return the refusal of JSON of too many values: 413, as they are all held for a moment."""
    message = f"the request has more than {most} JSON values; send smaller batches, or protobuf"
    return Refusal(413, Code.RESOURCE_EXHAUSTED, message)


def too_large(limit_bytes: int) -> Refusal:
    """Return the refusal of a request over the limit: 413, RESOURCE_EXHAUSTED without retry."""
    message = f"the request is over {limit_bytes} bytes after decompression; send smaller batches"
    return Refusal(413, Code.RESOURCE_EXHAUSTED, message)


def too_slow(timeout_s: float) -> Refusal:
    """Return the refusal of a request that did not arrive in time: 408, DEADLINE_EXCEEDED."""
    message = f"the request was not whole after {timeout_s:g} s"
    return Refusal(408, Code.DEADLINE_EXCEEDED, message)


def overloaded(full: str = "buffer") -> Refusal:
    """Return the refusal while memory or the log is full: 503, UNAVAILABLE, and when to retry."""
    return Refusal(503, Code.UNAVAILABLE, f"the collector's {full} is full", retry_s=RETRY_AFTER_S)


def stopping() -> Refusal:
    """Return the answer to what is not whole when the collector ends: 503, UNAVAILABLE."""
    return Refusal(503, Code.UNAVAILABLE, "the collector is stopping", retry_s=RETRY_AFTER_S)


def failed() -> Refusal:
    """Return the answer to a request that met a defect of ours: 500, INTERNAL."""
    return Refusal(500, Code.INTERNAL, "the collector failed on this request")


def defect(error: Exception) -> Refusal:
    """Tell a defect of ours, and return 500 for its request."""
    tell_defect("a request", error)
    return failed()


def cannot_listen(address: str, flag: str) -> UsageError:
    """Return the error of an address that is taken, or none of this host's."""
    fix = f"stop what listens there, or choose another address with {flag} HOST:PORT"
    return UsageError(f"cannot listen on {address}", fix=fix)


def answer(outcome: Outcome) -> Message:
    """Return the export response, its message cut where it is longer than anyone reads."""
    message = outcome.response()
    partial = message.partial_success
    if len(partial.error_message) > LONGEST_MESSAGE:
        partial.error_message = partial.error_message[: LONGEST_MESSAGE - 3] + "..."
    return message


class Sink(Protocol):
    """Takes requests."""

    def check_room(self) -> None:
        """Raise `overloaded()` while no new request may be read."""

    def reserve(self, size_bytes: int) -> None:
        """Count bytes of a request as held; raise `overloaded()` where that is too much."""

    def release(self, size_bytes: int) -> None:
        """Give reserved bytes back: the request has become rows, or has been refused."""

    def refused(self, refusal: Refusal) -> None:
        """Count a request that was refused."""

    async def export(self, signal: Signal, body: bytes, hops: tuple[str, ...] = ()) -> Outcome:
        """Take a request's bytes, decompressed; when this returns, it is acknowledged.

        Raises Refusal where the bytes are no request, or a defect of ours was met.
        """
        ...


@contextmanager
def reservation(sink: Sink) -> Iterator[Callable[[int], None]]:
    """Yield a function that reserves bytes of one request; they are released at the end."""
    taken_bytes = 0

    def take(size_bytes: int) -> None:
        nonlocal taken_bytes
        sink.reserve(size_bytes)
        taken_bytes += size_bytes

    sink.check_room()
    try:
        yield take
    finally:
        sink.release(taken_bytes)


@asynccontextmanager
async def read_within(timeout_s: float) -> AsyncIterator[None]:
    """Raise `too_slow()` where the reading inside takes longer."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise too_slow(timeout_s) from None
