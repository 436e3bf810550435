"""What the API process tells the exporter: one record per finished request, over a local socket.

Sending never waits: a full socket or a record too large is dropped and counted, and the count
travels with the next record. Nothing here imports OpenTelemetry; its cost is the exporter's.
"""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import orjson

AttributeValue = str | int | float | bool | list[str]
OUTCOMES = ("ok", "error", "refused", "aborted")

MAX_RECORD_BYTES = 64 * 1024
_SOCKET_BYTES = 1024 * 1024  # some hundred finished requests, while the exporter is busy


class RankRing(NamedTuple):
    """The ring of one rank of a replica, by its name."""

    name: str
    replica: str = "0"
    rank: int = 0


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One stage that the API process ran for a request; a child of its root. Monotonic ns."""

    name: str
    start_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue]


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A finished request: its root span and the stages of the API process. Monotonic ns."""

    request: int  # the number it has in the engine's records
    trace_id: int  # 128 bits
    span_id: int  # 64 bits, of the root
    parent_span_id: int | None  # from the caller's traceparent
    name: str  # chat or text_completion
    start_ns: int
    end_ns: int
    outcome: str  # one of OUTCOMES
    attributes: dict[str, AttributeValue]
    spans: Sequence[SpanRecord]
    sent_ns: int | None = None  # Submit.sent_ns; None if it was never sent to an engine
    replica: str = "0"  # the engine that it was sent to last


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """A rank is ready: attributes that every step span of it carries. A second one of the same
    rank is said by a new process, after a restart."""

    attributes: dict[str, AttributeValue]
    replica: str = "0"
    rank: int = 0


def open_channel() -> tuple[socket.socket, socket.socket]:
    """Return (API's end, exporter's end). When the first is closed, the exporter ends.

    Packets on a connection, where there are such: datagrams on Linux queue only
    net.unix.max_dgram_qlen (10) at a time, and say nothing when the other end is gone.
    """
    kind = getattr(socket, "SOCK_SEQPACKET", socket.SOCK_DGRAM)
    try:
        near, far = socket.socketpair(socket.AF_UNIX, kind)
    except OSError:  # macOS knows the name only
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    return near, far


class TelemetrySender:
    """The API's end of the channel."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self.dropped = 0  # records lost here so far

    def send(self, record: RequestRecord | EngineRecord) -> None:
        """Hand a record to the exporter, or drop and count it; never waits, never raises."""
        try:
            message = encode(record, self.dropped)
            if len(message) > MAX_RECORD_BYTES:
                self.dropped += 1
            else:
                self._channel.send(message)
        except (OSError, orjson.JSONEncodeError):
            self.dropped += 1

    def close(self) -> None:
        """Close the channel: the exporter drains what there is, flushes and ends."""
        self._channel.close()


def encode(record: RequestRecord | EngineRecord, dropped: int) -> bytes:
    """Return the message for a record, with the number of records dropped before it."""
    if isinstance(record, EngineRecord):
        place = {"replica": record.replica, "rank": record.rank}
        return orjson.dumps({"dropped": dropped, "engine": record.attributes, **place})
    fields = {name: getattr(record, name) for name in RequestRecord.__slots__}
    fields["trace_id"] = f"{record.trace_id:032x}"  # JSON integers end at 64 bits here
    return orjson.dumps({"dropped": dropped, "request": fields})


def decode(message: bytes) -> tuple[RequestRecord | EngineRecord, int]:
    """Return the record of a message, and how many records were dropped before it."""
    body = orjson.loads(message)
    if "engine" in body:
        return EngineRecord(body["engine"], body["replica"], body["rank"]), body["dropped"]
    fields = body["request"]
    fields["trace_id"] = int(fields["trace_id"], 16)
    fields["spans"] = [SpanRecord(**span) for span in fields["spans"]]
    return RequestRecord(**fields), body["dropped"]
