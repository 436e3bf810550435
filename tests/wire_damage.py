"""Damaged requests, and a scan of them right before memory that cannot be read.

As a script it is a child of a test: whatever a kernel reads behind the end kills it with SIGSEGV.
"""

import ctypes
import mmap
import sys
from random import Random

import numpy as np
from numpy.typing import NDArray
from wire_forms import Writer

from perfledger.collectors.wire import columns as at
from perfledger.collectors.wire.columns import Columns
from perfledger.collectors.wire.fates import decide, find_keys
from perfledger.collectors.wire.keys import KeyCodes, KeyTable, key_at
from perfledger.collectors.wire.scan import NO_ROOM, PRELUDE, scan_request

_LARGEST = 64 * 1024


def damaged(seed: int) -> bytes:
    """Return a request with a few bytes changed, lost, added or taken from elsewhere; or noise."""
    choose = Random(seed)
    if choose.random() < 0.05:
        return choose.randbytes(choose.randrange(200))
    body = bytearray(Writer(seed, choose.choice((0.0, 0.1)), content=seed % 2 == 0).request())
    for _ in range(choose.choice((1, 1, 2, 5))):
        at_, size = choose.randrange(len(body) + 1), choose.randrange(1, 12)
        match choose.randrange(6):
            case 0 if at_ < len(body):
                body[at_] ^= 1 << choose.randrange(8)
            case 1:
                del body[at_:]
            case 2:
                body[at_:at_] = choose.randbytes(size)
            case 3:
                del body[at_ : at_ + size]
            case 4:
                source = choose.randrange(len(body) + 1)
                body[at_ : at_ + size] = body[source : source + 4 * size]
            case 5 if at_ < len(body):
                body[at_] = choose.choice((0, 0x7F, 0x80, 0xFF))
    return bytes(body)


_FIELDS = (0, 1, 1, 2, 15, 16, 2**29 - 1, 2**29, 2**32, 2**61 - 1)
_NUMBERS = (0, 5, 2**63, 2**64 - 1, 2**64)


def group(seed: int) -> bytes:
    """Return a group, deprecated and unknown to OTLP, made of fields of which some are odd.

    Field number 0 and those that are too large, tags, lengths and numbers with zeros in front, ends
    that belong to another group, wire types that do not exist.
    """
    choose = Random(seed)
    return _tag(choose, 4, 3) + _fields(choose, 1) + _tag(choose, 4, 4)


def _fields(choose: Random, depth: int) -> bytes:
    content = b""
    for _ in range(choose.randrange(3)):
        field = choose.choice(_FIELDS)
        match choose.randrange(8):
            case 0:
                number = choose.choice(_NUMBERS)
                content += _tag(choose, field, 0) + _varint(number, choose.choice((0, 0, 1, 8, 9)))
            case 1:
                content += _tag(choose, field, 1) + bytes(8)
            case 2:
                size = choose.choice((0, 3))
                length = _varint(size, choose.choice((0, 0, 0, 3, 4, 5)))
                content += _tag(choose, field, 2) + length + b"\xff" * size
            case 3:
                content += _tag(choose, field, 5) + bytes(4)
            case 4 | 5 if depth < 20:
                end = field + (choose.random() < 0.1)
                content += _tag(choose, field, 3) + _fields(choose, depth + 1)
                content += _tag(choose, end, 4)
            case 6:
                content += _tag(choose, field, choose.randrange(8))
            case _:
                content += choose.randbytes(2)
    return content


def _tag(choose: Random, field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire, choose.choice((0,) * 12 + (1, 2, 3, 4, 5, 6, 9)))


def _varint(value: int, zeros: int) -> bytes:
    """Return a varint with so many zeros in front, which are behind it on the wire."""
    sevens = [value >> at_ & 0x7F for at_ in range(0, max(value.bit_length(), 1), 7)] + [0] * zeros
    return bytes([seven | 0x80 for seven in sevens[:-1]] + sevens[-1:])


class Guarded:
    """Memory that ends where nothing may be read."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, _LARGEST + mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.mprotect(ctypes.c_void_p(start + _LARGEST), mmap.PAGESIZE, 0) == 0
        self._start = start

    def put(self, content: bytes) -> NDArray[np.uint8]:
        """Return the last bytes before the end, filled with this."""
        place = (ctypes.c_uint8 * len(content)).from_address(self._start + _LARGEST - len(content))
        view = np.frombuffer(place, np.uint8)
        view[:] = np.frombuffer(content, np.uint8)
        return view

    def overread(self) -> int:
        """Read one byte too many, to show that it is noticed."""
        return ctypes.c_uint8.from_address(self._start + _LARGEST).value


def scan_all(guarded: Guarded, keys: KeyTable, body: bytes, limit: int, spans: int) -> int:
    """Run the kernels over a body, as SpanBatch does; return what the scan returned."""
    columns = Columns.with_room(1, spans)
    end = len(PRELUDE) + len(body)
    while True:
        columns.counts[:] = 0
        columns = columns._replace(data=guarded.put(PRELUDE + body))
        done = int(scan_request(*columns.scanned(), len(PRELUDE), end, limit))
        if done != NO_ROOM and (done < 0 or _decide(columns, keys, limit, end)):
            return done
        columns = columns.grown()


def _decide(columns: Columns, keys: KeyTable, limit: int, end: int) -> bool:
    rows = int(columns.counts[at.ATTRIBUTES])
    found, unknown = np.empty(rows, np.int32), np.empty(3, np.int32)
    start, what = 0, (columns.data, columns.attributes)
    while missing := find_keys(
        *what, start, rows, found[start:], unknown, *keys.arrays.for_kernels()
    ):
        for row in unknown[:missing].tolist():
            keys.entry_of(key_at(columns, row))
        start = int(unknown[0])
    columns.counts[at.USED] = end
    done = decide(
        *(columns.data, columns.spans, columns.attributes, columns.numbers, columns.extents),
        *(columns.events, columns.links, columns.left, columns.counts),
        *(columns.keys, columns.key_entries, 0, found),
        *(keys.arrays.entries, KeyCodes().of(keys), keys.seen, keys.seen_at),
        *(limit, _next_serial() << 32),
    )
    return bool(done != NO_ROOM)


_serials = iter(range(1, 2**31))


def _next_serial() -> int:
    return next(_serials)


def main() -> None:
    first, count = int(sys.argv[1]), int(sys.argv[2])
    guarded, keys = Guarded(), KeyTable(64)
    fine = sum(
        scan_all(guarded, keys, damaged(seed)[: _LARGEST // 2], 16 + seed % 50, 1 + seed % 3) >= 0
        for seed in range(first, first + count)
    )
    print(fine, flush=True)
    if sys.argv[3:] == ["overread"]:
        guarded.overread()


if __name__ == "__main__":
    main()
