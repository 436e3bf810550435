"""The write-ahead log: what is acknowledged is here, checksummed and synced, until it is a file.

`append` makes requests durable, `cut` ends a segment, `drop` deletes it once its rows are files,
and `leftover` is what an earlier process did not get to drop. `log_segments` has the format.

What an append refused may come back after a crash only if the disk also failed to take it back;
its sender will have sent it again, and the check for re-sent rows drops one of the two.
"""

import errno
import fcntl
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

from perfledger.collectors.wal.log_quarantine import Quarantine
from perfledger.collectors.wal.log_segments import (
    HEADER_BYTES,
    MARKER_BYTES,
    RECORD_BYTES,
    FileHeader,
    LogRecord,
    Segment,
    SegmentFile,
    SegmentName,
    body_view,
    encode,
    find_segments,
)
from perfledger.schema.durable_folders import make_durably, sync_folder
from perfledger.schema.errors import UsageError

__all__ = ["LogFull", "LogRecord", "Segment", "SegmentName", "WriteAheadLog"]

log = logging.getLogger("perfledger.collect")

_IOV_MAX = os.sysconf("SC_IOV_MAX")
_LOCK = "lock"
_QUARANTINE = "quarantine"


class LogFull(OSError):
    """The segments that are not dropped yet take all that the log may take."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        super().__init__(
            errno.ENOSPC, f"the write-ahead log has {max_bytes} bytes at most", str(folder)
        )


class WriteAheadLog:
    """The log of one namespace: one folder, one process. All methods are safe in any thread."""

    def __init__(
        self, folder: Path, lock: int, max_bytes: int | None, clock_ns: Callable[[], int]
    ) -> None:
        self._folder = folder
        self._process_lock = lock
        self._max_bytes = max_bytes
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._is_closed = False
        self._quarantine = Quarantine(folder / _QUARANTINE)
        self._leftover = find_segments(folder, self._quarantine)
        self._finished = {segment.name: segment for segment in self._leftover}
        self._finished_bytes = sum(segment.bytes for segment in self._leftover)
        self._newest_ns = max((name.created_ns for name in self._finished), default=-1)
        self._writer: _SegmentWriter | None = None

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        max_bytes: int | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> Self:
        """Open the log in a folder, which is made durably. Always starts, whatever is damaged.

        `max_bytes` limits the segments that are not dropped. Raises UsageError where another
        process has the log open, and where the folder cannot be used.
        """
        try:
            make_durably(folder)
            lock = _take_lock(folder)
        except OSError as error:
            raise UsageError(
                f"cannot keep a write-ahead log: {error.strerror or type(error).__name__}",
                where=str(folder),
                fix="give a folder on a local disk that you may write to with --store",
            ) from error
        try:
            return cls(folder, lock, max_bytes, clock_ns)
        except BaseException:
            os.close(lock)
            raise

    def leftover(self) -> list[Segment]:
        """Return the segments of earlier processes that are not dropped, oldest first."""
        with self._lock:
            return [segment for segment in self._leftover if segment.name in self._finished]

    def append(self, records: Sequence[LogRecord]) -> None:
        """Write records with one write and one sync; they are durable when this returns.

        Raises LogFull at the limit and OSError where the disk refuses; nothing of the records
        remains then, and a later append works again as soon as the disk does.
        """
        if not records:
            return
        with self._lock:
            if self._is_closed:
                raise ValueError("append to a closed write-ahead log")
            writer = self._writer or _SegmentWriter(self._folder, self._new_name())
            self._check_room(writer.bytes_needed(records))
            writer.append(records)
            self._writer = writer

    def cut(self) -> Segment | None:
        """End the segment that is being written; None if nothing was appended since the last."""
        with self._lock:
            return self._cut()

    def drop(self, segment: Segment) -> None:
        """Delete a segment durably; nothing happens if that is done. Raises OSError."""
        for file in segment.files:
            file.path.unlink(missing_ok=True)
        sync_folder(self._folder)
        with self._lock:
            if self._finished.pop(segment.name, None) is not None:
                self._finished_bytes -= segment.bytes

    @property
    def bytes(self) -> int:
        """Return the size of all segments that are not dropped."""
        with self._lock:
            return self._total_bytes()

    @property
    def segments(self) -> int:
        """Return how many segments are not dropped, the one being written included."""
        with self._lock:
            return len(self._finished) + (self._writer is not None)

    @property
    def quarantined_bytes(self) -> int:
        """Return how many unreadable bytes this process has found, torn ones included."""
        return self._quarantine.bytes

    @property
    def torn_bytes(self) -> int:
        """Return how many of them are unfinished appends of a process that crashed."""
        return self._quarantine.torn_bytes

    def set_aside(self, segment: Segment, record: LogRecord) -> None:
        """Keep a record in the quarantine that is whole and cannot be made rows of."""
        name = f"{segment.name}-{record.received_ns}-{record.kind}"
        self._quarantine.keep(name, body_view(record.body))

    def close(self) -> None:
        """Let go of the log. Segments that are not dropped are the next process's leftover."""
        with self._lock:
            if not self._is_closed:
                self._cut()
                self._is_closed = True
                os.close(self._process_lock)

    def _new_name(self) -> SegmentName:
        """Name a segment by the clock, and after every older one if the clock was set back."""
        self._newest_ns = max(self._clock_ns(), self._newest_ns + 1)
        return SegmentName.of(self._newest_ns, secrets.randbits(32))

    def _cut(self) -> Segment | None:
        writer, self._writer = self._writer, None
        if writer is None or not (files := writer.finish()):
            return None
        segment = Segment(writer.name, files, self._quarantine)
        self._finished[segment.name] = segment
        self._finished_bytes += segment.bytes
        return segment

    def _check_room(self, more_bytes: int) -> None:
        if self._max_bytes is not None and self._total_bytes() + more_bytes > self._max_bytes:
            raise LogFull(self._folder, self._max_bytes)

    def _total_bytes(self) -> int:
        return self._finished_bytes + (self._writer.bytes if self._writer else 0)


class _SegmentWriter:
    """The segment being written: one file, and one more each time that the disk failed a file."""

    def __init__(self, folder: Path, name: SegmentName) -> None:
        self.name = name
        self._folder = folder
        self._parts = 0
        self._given_up: list[SegmentFile] = []
        self._file: _FileWriter | None = None

    @property
    def bytes(self) -> int:
        """Return how many bytes are acknowledged."""
        return sum(file.end for file in self._given_up) + (self._file.end if self._file else 0)

    def bytes_needed(self, records: Sequence[LogRecord]) -> int:
        """Return by how much an append would grow the segment."""
        header_bytes = 0 if self._file else HEADER_BYTES
        return header_bytes + sum(RECORD_BYTES + body_view(item.body).nbytes for item in records)

    def append(self, records: Sequence[LogRecord]) -> None:
        """Make records durable. Raises OSError; the segment is as before then."""
        if self._file is None:
            self._file = self._next_file()
        file = self._file
        try:
            file.append(records)
        finally:
            if file.is_closed:
                self._file = None
                if file.end:
                    self._given_up.append(file.acknowledged())

    def finish(self) -> tuple[SegmentFile, ...]:
        """Close the segment and return its files, none if nothing was ever acknowledged."""
        files = tuple(self._given_up)
        if self._file is not None:
            self._file.close()
            files += (self._file.acknowledged(),)
        return files

    def _next_file(self) -> "_FileWriter":
        earlier_bytes = self._given_up[-1].end if self._given_up else 0
        marker = secrets.token_bytes(MARKER_BYTES)
        header = FileHeader(self.name, self._parts, earlier_bytes, marker)
        self._parts += 1
        return _FileWriter(self._folder, header)


class _FileWriter:
    """A file open for appends; bytes before `end` are durable, there are none behind it."""

    def __init__(self, folder: Path, header: FileHeader) -> None:
        self._path = folder / header.file_name
        self._header = header
        self.end = 0
        self.is_closed = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._handle = os.open(self._path, flags, 0o600)

    def acknowledged(self) -> SegmentFile:
        """Return what to read of the file."""
        return SegmentFile(self._path, self._header.marker, self.end)

    def append(self, records: Sequence[LogRecord]) -> None:
        """Write and sync; on any error take everything back, or else close the file for good."""
        is_new = not self.end
        is_written = is_durable = False
        try:
            buffers = encode(records, self._header.marker, self.end or HEADER_BYTES)
            if is_new:
                buffers.insert(0, memoryview(self._header.pack()))
            end = _write_all(self._handle, buffers, self.end)
            is_written = True
            os.fdatasync(self._handle)
            if is_new:
                sync_folder(self._path.parent)
            self.end = end
            is_durable = True
        finally:
            if not is_durable:
                self._take_back(is_sync_failed=is_written)

    def close(self) -> None:
        """Close the file; what is acknowledged stays."""
        self.is_closed = True
        with suppress(OSError):  # what counts is synced
            os.close(self._handle)

    def _take_back(self, *, is_sync_failed: bool) -> None:
        """Remove what is behind the last good byte.

        After a failed sync the kernel may call pages clean that never reached the disk, so that
        the next sync would succeed and mean nothing: such a file takes no more appends.
        """
        is_good = False
        with suppress(OSError):
            os.ftruncate(self._handle, self.end)
            if not is_sync_failed and self.end:
                os.fdatasync(self._handle)
                is_good = True
        if is_good:
            return
        self.close()
        if self.end:
            log.error("log file %s is given up at byte %d", self._path, self.end)
        else:
            with suppress(OSError):
                self._path.unlink()


def _write_all(handle: int, buffers: list[memoryview], offset: int) -> int:
    """Write buffers at an offset, in as few calls as the kernel allows; return the new end."""
    first = 0
    while first < len(buffers):
        written = os.pwritev(handle, buffers[first : first + _IOV_MAX], offset)
        offset += written
        while first < len(buffers) and written >= buffers[first].nbytes:
            written -= buffers[first].nbytes
            first += 1
        if written:
            buffers[first] = buffers[first][written:]
    return offset


def _take_lock(folder: Path) -> int:
    """Return the handle that holds the log. Raises UsageError if somebody else has it."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 20, 0).decode("ascii", "replace").strip()
        os.close(handle)
        raise UsageError(
            f"process {holder or 'unknown'} already writes this log",
            where=str(folder),
            fix="stop that collector, or give this one another --store",
        ) from None
    except BaseException:
        os.close(handle)
        raise
    with suppress(OSError):  # only for the message above; the disk may be full
        os.pwrite(handle, f"{os.getpid():<10}".encode(), 0)
    return handle
