"""Requests into the log, in groups: one thread scans them, appends and syncs, then answers.

While it syncs one group the next one gathers, so a group is as large as the disk is slow and
nobody waits for a timer. What is answered is synced, and content has been removed before.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from perfledger.collectors.defects import tell_defect
from perfledger.collectors.item_counts import ItemCounts
from perfledger.collectors.otlp_rows import SIGNALS, Outcome, Signal, UndecodableRequest
from perfledger.collectors.segments import OpenSegment, Taken
from perfledger.collectors.transport.otlp_receiver import (
    failed,
    overloaded,
    stopping,
    undecodable,
)
from perfledger.collectors.wal.write_ahead_log import LogRecord, Segment, WriteAheadLog
from perfledger.collectors.wire.columns import Columns
from perfledger.collectors.wire.span_batch import SpanReader

log = logging.getLogger("perfledger.collect")
_GROUP_BYTES = 8 * 2**20
_GROUP_REQUESTS = 64
_LEAST_ROOM, _MOST_ROOM = (2**20, 4096), (96 * 2**20, 2**17)
KINDS = {signal: number for number, signal in enumerate(SIGNALS)}

Forward = Callable[[Signal, bytes, tuple[str, ...]], None]


@dataclass
class _Request:
    signal: Signal
    body: bytes
    received_ns: int
    hops: tuple[str, ...]
    answer: "Future[Outcome]" = field(default_factory=Future)


@dataclass(frozen=True)
class IngestLimits:
    """How long a value may be, when a segment is cut (by memory or age), and what may be held."""

    value_bytes: int
    segment_bytes: int
    segment_s: float
    most_held_bytes: int = 2**62


class Ingest:
    """`submit` requests; `cut` gives what has gathered. The thread runs from `start` to `stop`."""

    def __init__(
        self,
        wal: WriteAheadLog,
        limits: IngestLimits,
        counts: ItemCounts,
        forward: Forward | None = None,
    ) -> None:
        self._wal = wal
        self._limits = limits
        self._counts = counts
        self._forward = forward
        self._reader = SpanReader(limits.value_bytes)
        self._arrived: deque[_Request] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._is_refusing = False
        # Guards the open segment. It is held during a sync, so the event loop never takes it.
        self._lock = threading.Lock()
        self._open: OpenSegment | None = None
        self._cut: deque[tuple[Segment, OpenSegment]] = deque()
        self._free: list[Columns] = []
        # Bytes and spans that the next segment should have room for: growing costs a copy of all.
        self._room: tuple[int, ...] = _LEAST_ROOM
        self._thread = threading.Thread(target=self._run, name="ingest", daemon=True)

    def start(self) -> None:
        """Let requests be answered from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Answer what has been submitted, then end."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    async def submit(self, signal: Signal, body: bytes, hops: tuple[str, ...]) -> Outcome:
        """Return once the request is durable. Raises Refusal."""
        request = _Request(signal, body, time.time_ns(), hops)
        with self._wake:
            if self._stopping:
                raise stopping()
            self._arrived.append(request)
            self._wake.notify()
        return await asyncio.wrap_future(request.answer)

    @property
    def held_bytes(self) -> int:
        """Return about how much memory the segments take that are open or wait to be taken."""
        return sum(segment.held_bytes for segment in self._held())

    def oldest_s(self) -> float | None:
        """Return when the oldest of these segments was opened (monotonic), None without any."""
        return min(
            (segment.opened_s for segment in self._held() if segment.items.total()), default=None
        )

    def _held(self) -> list[OpenSegment]:
        opened = self._open
        held = [segment for _, segment in tuple(self._cut)]
        return held if opened is None else [*held, opened]

    def next_cut(self, *, everything: bool = False) -> tuple[Segment, OpenSegment] | None:
        """Return the oldest segment that takes no more, or with `everything` also the open one."""
        with self._lock:
            opened = self._open
            if opened is not None:
                aged = time.monotonic() - opened.opened_s >= self._limits.segment_s
                if aged or everything:
                    self._cut_open(opened)
            return self._cut.popleft() if self._cut else None

    def give_back(self, columns: Columns) -> None:
        """Take the arrays of a segment that is done with, to be filled again."""
        is_large = columns.data.size > _MOST_ROOM[0] or columns.spans.shape[1] > _MOST_ROOM[1]
        if len(self._free) < 2 and not is_large:
            self._free.append(columns)

    def _cut_open(self, opened: OpenSegment) -> None:
        segment = self._wal.cut()
        if segment is not None:
            self._cut.append((segment, opened))
        self._open = None
        held = (opened.spans.used_bytes, opened.spans.rows)
        self._room = tuple(
            max(least, min(5 * size // 4, most))
            for least, size, most in zip(_LEAST_ROOM, held, _MOST_ROOM, strict=True)
        )

    def _run(self) -> None:
        while (group := self._next_group()) is not None:
            try:
                self._take_group(group)
            except Exception as error:
                self._defect("taking requests", error)
            for request in group:
                if not request.answer.done():
                    request.answer.set_exception(failed())

    def _next_group(self) -> list[_Request] | None:
        """Wait for requests; return None in the end."""
        with self._wake:
            while not self._arrived:
                if self._stopping:
                    return None
                self._wake.wait()
            group: list[_Request] = []
            size = 0
            while self._arrived and size < _GROUP_BYTES and len(group) < _GROUP_REQUESTS:
                request = self._arrived.popleft()
                # Its sender may have gone away while it waited here.
                if request.answer.set_running_or_notify_cancel():
                    size += len(request.body)
                    group.append(request)
            return group

    def _take_group(self, group: Sequence[_Request]) -> None:
        with self._lock:
            opened = self._opened()
            mark = opened.mark()
            taken = [(request, one) for request in group if (one := self._add(opened, request))]
            records = [
                LogRecord(KINDS[one.signal], request.received_ns, one.kept)
                for request, one in taken
                if one.items
            ]
            try:
                if records:
                    self._wal.append(records)
            except Exception as error:
                opened.take_back(mark)
                if not isinstance(error, OSError):
                    raise
                self._refuse(taken, error)
                return
            self._is_refusing = False
            self._counts.took((one.signal.table, one.tally) for _, one in taken)
            for request, one in taken:
                request.answer.set_result(Outcome.of(one.signal, one.tally))
            self._forward_all(taken)
            if opened.held_bytes >= self._limits.segment_bytes:
                self._cut_open(opened)

    def _opened(self) -> OpenSegment:
        if self._open is None:
            columns = (
                self._free.pop() if self._free else Columns.with_room(self._room[0], self._room[1])
            )
            self._open = OpenSegment(self._reader, columns)
        return self._open

    def _add(self, opened: OpenSegment, request: _Request) -> Taken | None:
        if self.held_bytes > self._limits.most_held_bytes:
            # Rows may take many times their bytes on the wire.
            request.answer.set_exception(overloaded())
            return None
        mark = opened.mark()
        try:
            return opened.add(request.signal, request.body, request.received_ns)
        except UndecodableRequest as error:
            request.answer.set_exception(undecodable(error.what))
        except Exception as error:
            opened.take_back(mark)
            self._defect("decoding", error)
            request.answer.set_exception(failed())
        return None

    def _refuse(self, taken: Sequence[tuple[_Request, Taken]], error: OSError) -> None:
        self._counts.add({"write_failures": 1})
        if not self._is_refusing:
            log.error("cannot write to the log, requests are refused: %s", error.strerror or error)
        self._is_refusing = True
        for request, _ in taken:
            request.answer.set_exception(overloaded("log, or its disk,"))

    def _forward_all(self, taken: Sequence[tuple[_Request, Taken]]) -> None:
        if self._forward is None:
            return
        for request, one in taken:
            if one.items:
                self._forward(one.signal, bytes(one.kept), request.hops)

    def replay(self, segment: Segment) -> OpenSegment:
        """Return what an earlier process acknowledged and did not store.

        A record that cannot be read any more, as by a stricter version, goes alone: its bytes are
        kept in the log's folder, and it is counted.
        """
        opened = OpenSegment(SpanReader(self._limits.value_bytes))
        taken = []
        for record in segment.records():
            mark = opened.mark()
            try:
                signal = SIGNALS[record.kind]
                one = opened.add(signal, bytes(record.body), record.received_ns)
            except Exception as error:
                opened.take_back(mark)
                self._defect("replaying a record", error)
                self._wal.set_aside(segment, record)
                self._counts.add({"log_unreadable_requests": 1})
            else:
                taken.append((signal.table, one.tally))
        self._counts.took(taken)
        self._counts.add({"log_replayed_requests": len(taken)})
        return opened

    def _defect(self, what: str, error: Exception) -> None:
        """Count and tell a defect of ours."""
        self._counts.add({"defects": 1})
        tell_defect(what, error)
