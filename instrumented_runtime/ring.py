"""A ring of fixed-width records in shared memory: one process writes, one process reads.

The writer never waits: a full ring drops the record and counts it, and the next record that fits
carries the count, so the reader knows where the gap is. Nothing here is locked, because each word
of the header has one writer:

    words 0-1    magic, slots             written once, before anyone attaches
    words 8-9    head, dropped            the writer's
    words 16-18  tail, exported, failed   the reader's

Why a torn record is never read: the writer stores the payload first and `head` after it, each as
one aligned 64-bit word; the reader takes slots below `head` only, and the writer reuses a slot
only after `tail` has passed it. x86-64 keeps the order of stores and of loads. Other processors
may show them in another order, within a microsecond; there the reader waits a millisecond between
`head` and the payload. A writer killed in the middle leaves `head` where it was.

The memory is anonymous (memfd): it is gone with the last process that has it, however that ends.
"""

import mmap
import os
import platform
import struct
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

from perfledger.instrumented_runtime.records import KINDS, WORDS, Record
from perfledger.schema.errors import PerfledgerError

MAGIC = 0x7066_6C64_0001
_SLOTS, _HEAD, _DROPPED, _TAIL, _EXPORTED, _EXPORT_FAILED = 1, 8, 9, 16, 17, 18
_HEADER_BYTES = 24 * 8  # three cache lines: the two sides do not fight over one
_SLOT = struct.Struct(f"={WORDS}q")
_STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64")

# In a slot: kind, records dropped before this one, then the fields of the kind.
_PACK: dict[int, Callable[..., None]] = {
    kind: struct.Struct(f"={2 + len(fields._fields)}q").pack_into for kind, fields in KINDS.items()
}


class Gap(NamedTuple):
    """`dropped` records are missing here."""

    dropped: int


class Counts(NamedTuple):
    """What became of the telemetry so far: ring records dropped, spans exported, spans lost."""

    dropped: int
    exported: int
    export_failed: int


class Ring:
    """The memory, held by the process that starts the other two. `name` is all they need."""

    def __init__(self, fd: int, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self._fd = fd
        self._words = memoryview(memory).cast("q")

    @classmethod
    def create(cls, slots: int) -> "Ring":
        """Make a ring for `slots` records (128 bytes each), empty."""
        size = _HEADER_BYTES + slots * _SLOT.size
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("perfledger-ring")
            name = f"/proc/{os.getpid()}/fd/{fd}"
        else:
            fd, name = tempfile.mkstemp(prefix="perfledger-ring-")
        os.ftruncate(fd, size)
        ring = cls(fd, name, mmap.mmap(fd, size))
        ring._words[_SLOTS] = slots
        ring._words[0] = MAGIC
        return ring

    def counts(self) -> Counts:
        """Return the counters of the header as they are now."""
        return Counts(*(self._words[at] for at in (_DROPPED, _EXPORTED, _EXPORT_FAILED)))

    @property
    def unread(self) -> int:
        """Records written and not yet read."""
        return int(self._words[_HEAD] - self._words[_TAIL])

    def close(self) -> None:
        """Let go of the memory; processes that attached keep it until they end."""
        os.close(self._fd)
        if not self.name.startswith("/proc/"):
            os.unlink(self.name)


def _attach(name: str) -> tuple[mmap.mmap, memoryview]:
    """Map a ring by its name, pages present, so that no write has to fault one in."""
    try:
        fd = os.open(name, os.O_RDWR)
    except OSError as error:
        raise PerfledgerError(
            f"cannot attach the telemetry ring: {error.strerror}",
            where=name,
            fix="the process that made the ring must be alive and of the same user",
        ) from error
    try:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        memory = mmap.mmap(fd, os.fstat(fd).st_size, flags=flags)
    finally:
        os.close(fd)
    words = memoryview(memory).cast("q")
    if words[0] != MAGIC:
        raise PerfledgerError("not a telemetry ring of this version", where=name)
    return memory, words


class Writer:
    """The engine's end. One per ring at a time; a later one continues where the last stopped."""

    __slots__ = ("_dropped", "_head", "_memory", "_slots", "_tail", "_words")

    def __init__(self, memory: mmap.mmap, words: memoryview) -> None:
        self._memory, self._words = memory, words
        self._slots: int = words[_SLOTS]
        self._head: int = words[_HEAD]
        self._tail: int = words[_TAIL]  # as last seen: read again only when the ring looks full
        self._dropped: int = words[_DROPPED]

    @classmethod
    def attach(cls, name: str) -> "Writer":
        """Attach to `Ring.name`. Raises PerfledgerError if there is no such ring."""
        return cls(*_attach(name))

    def write(self, kind: int, record: tuple[int, ...]) -> None:
        """Write one record of a kind in records.KINDS; never waits and never raises.

        Dropped and counted: any record while the ring is full, and one that is not of its kind
        (fields missing, a value beyond 64 bits), for telemetry must not end its host.
        """
        head = self._head
        if head - self._tail >= self._slots:
            self._tail = self._words[_TAIL]
            if head - self._tail >= self._slots:
                self._drop()
                return
        try:
            offset = _HEADER_BYTES + head % self._slots * 128
            _PACK[kind](self._memory, offset, kind, self._dropped, *record)
        except (struct.error, KeyError):
            self._drop()
            return
        self._words[_HEAD] = self._head = head + 1

    def _drop(self) -> None:
        self._words[_DROPPED] = self._dropped = self._dropped + 1


class Reader:
    """The exporter's end. One per ring."""

    def __init__(self, memory: mmap.mmap, words: memoryview) -> None:
        self._memory, self._words = memory, words
        self._slots: int = words[_SLOTS]
        self._tail: int = words[_TAIL]
        self._dropped_before = 0

    @classmethod
    def attach(cls, name: str) -> "Reader":
        """Attach to `Ring.name`. Raises PerfledgerError if there is no such ring."""
        return cls(*_attach(name))

    @property
    def dropped(self) -> int:
        """Records dropped since the ring was made, also those not yet seen as a Gap."""
        return int(self._words[_DROPPED])

    def read(self, limit: int) -> list[Record | Gap]:
        """Return up to `limit` records in order, a Gap wherever records were dropped."""
        count = min(self._words[_HEAD] - self._tail, limit)
        if count <= 0:
            return []
        if not _STORES_IN_ORDER:
            time.sleep(0.001)
        first = self._tail % self._slots
        until_wrap = min(count, self._slots - first)
        raw = self._copy(first, until_wrap) + self._copy(0, count - until_wrap)
        self._tail += count
        self._words[_TAIL] = self._tail  # from here on the writer may reuse the slots
        return self._decode(raw)

    def gap_at_end(self) -> list[Gap]:
        """Return the gap behind the last record read, unless a record follows it by now."""
        dropped = self.dropped
        missing = dropped - self._dropped_before
        if not missing or self._words[_HEAD] != self._tail:
            return []
        self._dropped_before = dropped
        return [Gap(missing)]

    def publish(self, exported: int, export_failed: int) -> None:
        """Show everyone how many spans were exported and lost since the start."""
        self._words[_EXPORTED], self._words[_EXPORT_FAILED] = exported, export_failed

    def _copy(self, first: int, count: int) -> bytes:
        start = _HEADER_BYTES + first * _SLOT.size
        return self._memory[start : start + count * _SLOT.size]

    def _decode(self, raw: bytes) -> list[Record | Gap]:
        out: list[Record | Gap] = []
        for kind, dropped, *words in _SLOT.iter_unpack(raw):
            if dropped != self._dropped_before:
                out.append(Gap(dropped - self._dropped_before))
                self._dropped_before = dropped
            fields = KINDS[kind]
            out.append(fields(*words[: len(fields._fields)]))
        return out


def to_signed(word: int) -> int:
    """Return an unsigned 64-bit id as the signed word that a record holds."""
    return word - (1 << 64) if word >> 63 else word


def to_unsigned(word: int) -> int:
    """Return the unsigned 64-bit id that a record holds as a signed word."""
    return word & 0xFFFF_FFFF_FFFF_FFFF
