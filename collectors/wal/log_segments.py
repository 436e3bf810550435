"""The files of the write-ahead log: their format, version 1, and the reader that survives damage.

A file is a header and then records; all numbers are little-endian, all checksums CRC-32:

    header   magic 8 | version u32 | id u32 | created_ns u64 | part u32 | earlier_bytes u64
             | marker 8 | checksum u32
    record   marker 8 | length u32 | kind u32 | received_ns i64 | checksum of the body u32
             | checksum of this header u32 | body

The marker is random for each file, and a record header's checksum starts from the record's offset:
a record that was moved, is stale or came in somebody's body is never taken for one of this file.
A length has a checksum of its own, so damage in a body costs that record alone; after a damaged
record header the reader goes on at the next place where marker and checksum are right.
"""

import os
import re
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt

from perfledger.collectors.wal.log_quarantine import Damage, Quarantine

Body = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

SUFFIX = ".wal"
VERSION = 1
_MAGIC = b"perfwal\n"
_HEADER = struct.Struct("<8sIIQIQ8s")
_RECORD = struct.Struct("<8sIIqI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
RECORD_BYTES = _RECORD.size + _CHECKSUM.size
MARKER_BYTES = 8
_SCAN_BYTES = 1 << 20
_SEGMENT_NAME = re.compile(r"(0|[1-9]\d{0,18})-([0-9a-f]{8})")
_FILE_NAME = re.compile(rf"({_SEGMENT_NAME.pattern})\.(0|[1-9]\d{{0,8}}){re.escape(SUFFIX)}")


@dataclass(frozen=True)
class LogRecord:
    """One request as it arrived, without its content. `kind`: 0 traces, 1 metrics, 2 logs."""

    kind: int
    received_ns: int
    body: Body


class SegmentName(str):
    """`<created wall ns>-<8 hex digits>`; the files made of a segment carry its name."""

    @classmethod
    def of(cls, created_ns: int, number: int) -> Self:
        """Return the name of a segment; `number` (32 random bits) tells equal times apart."""
        return cls(f"{created_ns}-{number:08x}")

    @property
    def created_ns(self) -> int:
        """Return when the segment was begun (wall ns)."""
        return int(self.partition("-")[0])


class UnreadableFile(Exception):
    """Why a file is no part of the log. `is_torn`: a crash while it was begun explains it."""

    def __init__(self, reason: str, *, is_torn: bool = False) -> None:
        super().__init__(reason)
        self.is_torn = is_torn


@dataclass(frozen=True)
class FileHeader:
    """What the beginning of a file says.

    A segment is one file, part 0. Only where the disk failed does it go on in a further part,
    which says how many bytes of the part before hold (`earlier_bytes`): what stands behind them
    was refused.
    """

    name: SegmentName
    part: int
    earlier_bytes: int
    marker: bytes

    @property
    def file_name(self) -> str:
        """Return the name that the file has while it is part of a log."""
        return f"{self.name}.{self.part}{SUFFIX}"

    def pack(self) -> bytes:
        """Return the header as bytes, checksum included."""
        number = int(self.name.partition("-")[2], 16)
        fields = _HEADER.pack(
            _MAGIC,
            VERSION,
            number,
            self.name.created_ns,
            self.part,
            self.earlier_bytes,
            self.marker,
        )
        return fields + _CHECKSUM.pack(zlib.crc32(fields))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file's header. Raises UnreadableFile where it is none of ours, and OSError."""
        if not _FILE_NAME.fullmatch(path.name):
            raise UnreadableFile("its name is not one of this log's")
        if not stat.S_ISREG(path.lstat().st_mode):
            raise UnreadableFile("it is not a file")
        with open(path, "rb") as file:
            packed = file.read(HEADER_BYTES)
        if len(packed) < HEADER_BYTES:
            raise UnreadableFile("it ends within its header", is_torn=True)
        header = cls._unpack(packed)
        if header.file_name != path.name:
            raise UnreadableFile(f"its header is that of {header.file_name}")
        return header

    @classmethod
    def _unpack(cls, packed: bytes) -> Self:
        fields = packed[: _HEADER.size]
        magic, version, number, created_ns, part, earlier_bytes, marker = _HEADER.unpack(fields)
        if magic == _MAGIC and version != VERSION:
            raise UnreadableFile(f"its format is version {version}, this program's is {VERSION}")
        if magic != _MAGIC or _checksum_at(packed, _HEADER.size) != zlib.crc32(fields):
            raise UnreadableFile("its header is damaged")
        return cls(SegmentName.of(created_ns, number), part, earlier_bytes, marker)


def body_view(body: Body) -> memoryview:
    """Return the bytes of a body, not copied."""
    return memoryview(cast(Any, body)).cast("B")


def encode(records: Iterable[LogRecord], marker: bytes, offset: int) -> list[memoryview]:
    """Return what to write at an offset of the file with that marker; bodies are not copied."""
    buffers = []
    for record in records:
        body = body_view(record.body)
        fields = _RECORD.pack(
            marker, body.nbytes, record.kind, record.received_ns, zlib.crc32(body)
        )
        checksum = _CHECKSUM.pack(_header_checksum(fields, offset))
        buffers += [memoryview(fields + checksum), body]
        offset += RECORD_BYTES + body.nbytes
    return buffers


@dataclass(frozen=True)
class SegmentFile:
    """The first `end` bytes of a file: what of it is acknowledged, or may be (`may_be_torn`)."""

    path: Path
    marker: bytes
    end: int
    may_be_torn: bool = False


@dataclass(frozen=True)
class Segment:
    """A part of the log that is complete: read it, write its rows to files, drop it."""

    name: SegmentName
    files: tuple[SegmentFile, ...]
    _quarantine: Quarantine = field(repr=False, compare=False)

    @property
    def bytes(self) -> int:
        """Return the segment's size in its files."""
        return sum(file.end for file in self.files)

    def records(self) -> Iterator[LogRecord]:
        """Yield the records in the order of their appends, one in memory at a time.

        Damaged ones are left out, counted and put into quarantine; so is what the disk cannot
        read. Raises OSError only where a file cannot be opened.
        """
        for file in self.files:
            yield from _read_records(file, partial(self._quarantine.copy, file.path))


def find_segments(folder: Path, quarantine: Quarantine) -> list[Segment]:
    """Return the segments in a folder, oldest first; what cannot be one goes into quarantine.

    Files that do not carry the log's suffix are somebody else's and are left alone.
    """
    headers = []
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            headers.append(FileHeader.read(path))
        except UnreadableFile as reason:
            quarantine.move(path, str(reason), is_torn=reason.is_torn)
        except OSError as error:
            quarantine.move(path, f"it cannot be read: {error.strerror}")
    headers.sort(key=lambda header: (header.name.created_ns, header.name, header.part))
    return [
        Segment(name, _files_of(folder, list(parts)), quarantine)
        for name, parts in groupby(headers, key=lambda header: header.name)
    ]


def _files_of(folder: Path, parts: list[FileHeader]) -> tuple[SegmentFile, ...]:
    """Return a segment's files in order, each up to where the part after it says."""
    files = []
    for header, following in zip(parts, [*parts[1:], None], strict=True):
        path = folder / header.file_name
        end = following.earlier_bytes if following else path.stat().st_size
        files.append(SegmentFile(path, header.marker, end, may_be_torn=following is None))
    return tuple(files)


def _read_records(file: SegmentFile, set_aside: Callable[[Damage], None]) -> Iterator[LogRecord]:
    """Yield the records of a file; the bytes between them are handed to `set_aside`."""
    handle = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = min(file.end, os.fstat(handle).st_size)
        offset = HEADER_BYTES
        while offset < end:
            record, following = _read_record(handle, file.marker, offset, end)
            if record is not None:
                yield record
            else:
                set_aside(Damage(offset, following, file.may_be_torn and following == end))
            offset = following
        if end < file.end:
            set_aside(Damage(end, file.end, is_torn=False))
    finally:
        os.close(handle)


class _RecordHeader(NamedTuple):
    length: int
    kind: int
    received_ns: int
    body_checksum: int


def _read_record(handle: int, marker: bytes, offset: int, end: int) -> tuple[LogRecord | None, int]:
    """Return the record at an offset, None if it is damaged, and where to go on."""
    header = _read_header(handle, marker, offset)
    if header is None:
        return None, _find_record(handle, marker, offset + 1, end)
    start = offset + RECORD_BYTES
    following = start + header.length
    if following > end:
        return None, end
    body = _read(handle, header.length, start)
    if len(body) < header.length or zlib.crc32(body) != header.body_checksum:
        return None, following
    return LogRecord(header.kind, header.received_ns, body), following


def _read_header(handle: int, marker: bytes, offset: int) -> _RecordHeader | None:
    packed = _read(handle, RECORD_BYTES, offset)
    if len(packed) < RECORD_BYTES or not packed.startswith(marker):
        return None
    fields = packed[: _RECORD.size]
    if _checksum_at(packed, _RECORD.size) != _header_checksum(fields, offset):
        return None
    return _RecordHeader(*_RECORD.unpack(fields)[1:])


def _find_record(handle: int, marker: bytes, offset: int, end: int) -> int:
    """Return where the first intact record header at or after an offset is, or `end`."""
    while offset < end:
        chunk = _read(handle, min(_SCAN_BYTES, end - offset), offset)
        place = chunk.find(marker)
        while place >= 0:
            if _read_header(handle, marker, offset + place) is not None:
                return offset + place
            place = chunk.find(marker, place + 1)
        offset += _SCAN_BYTES - MARKER_BYTES + 1
    return end


def _read(handle: int, length: int, offset: int) -> bytes:
    """Return bytes at an offset; fewer where the file ends or the disk cannot read them."""
    parts: list[bytes] = []
    with suppress(OSError):
        while length and (part := os.pread(handle, length, offset)):
            parts.append(part)
            length -= len(part)
            offset += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _header_checksum(fields: bytes, offset: int) -> int:
    return zlib.crc32(fields, zlib.crc32(offset.to_bytes(8, "little")))


def _checksum_at(packed: bytes, offset: int) -> int:
    return cast(int, _CHECKSUM.unpack_from(packed, offset)[0])
