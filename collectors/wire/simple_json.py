"""Arrays of plain values as JSON, in a kernel; everything else is left to Python.

Plain are integers, booleans, empty values and ASCII text that needs no escaping: what most arrays
in telemetry hold (finish reasons, shapes, hosts).
"""

import numpy as np

from perfledger.collectors.wire.jit import copy_bytes, load8, part, store8
from perfledger.collectors.wire.protobuf import LENGTH, VARINT, next_field

_NOT_PLAIN = -1
_COMMA, _OPEN, _CLOSE, _QUOTE, _BACKSLASH, _MINUS, _ZERO = b',[]"\\-0'
_LONGEST_NUMBER = 20
_TRUE = (0x74, 0x72, 0x75, 0x65)
_FALSE = (0x66, 0x61, 0x6C, 0x73, 0x65)
_NULL = (0x6E, 0x75, 0x6C, 0x6C)


@part
def write_plain_array(position: int, end: int, to: int, limit: int) -> int:
    """Write the JSON of a KeyValue's array to an address; return its length.

    Returns -1 where it is not plain, or would not fit into `limit` bytes: then what was written
    means nothing.
    """
    found, array, array_end = 0, np.int64(0), np.int64(0)
    while position < end:
        field, wire, value, position = next_field(position, end)
        if position < 0 or wire != LENGTH or field > 2:
            return _NOT_PLAIN
        if field == 2:
            inner, wire, array, array_end = next_field(value, position)
            found += 1
            if array_end != position or inner != 5 or wire != LENGTH:
                return _NOT_PLAIN
    if found != 1:
        return _NOT_PLAIN
    written = np.int64(1)
    store8(to, _OPEN)
    while array < array_end:
        field, wire, value, array = next_field(array, array_end)
        if array < 0 or field != 1 or wire != LENGTH:
            return _NOT_PLAIN
        if written > 1:
            store8(to + written, _COMMA)
            written += 1
        length = _write_element(value, array, to + written, limit - written - 1)
        if length < 0:
            return _NOT_PLAIN
        written += length
    store8(to + written, _CLOSE)
    # The same sum as attribute_values keeps: a value that comes near the limit is left to it.
    return written + 1 if written + 1 <= limit - 2 else _NOT_PLAIN


@part
def _write_element(position: int, end: int, to: int, room: int) -> int:
    """Write one AnyValue; return its length, or -1."""
    if room < _LONGEST_NUMBER + 2:
        return _NOT_PLAIN
    if position == end:
        return _write_word(_NULL, to)
    field, wire, value, position = next_field(position, end)
    if position != end:
        return _NOT_PLAIN
    if field == 1 and wire == LENGTH:
        return _write_text(value, end, to) if end - value + 2 <= room else _NOT_PLAIN
    if field == 2 and wire == VARINT:
        return _write_word(_TRUE, to) if value else _write_word(_FALSE, to)
    if field == 3 and wire == VARINT:
        return _write_number(value, to)
    return _NOT_PLAIN


@part
def _write_word(word: tuple[int, ...], to: int) -> int:
    for index in range(len(word)):
        store8(to + index, word[index])
    return len(word)


@part
def _write_text(start: int, end: int, to: int) -> int:
    for position in range(start, end):
        byte = load8(position)
        if byte < 0x20 or byte >= 0x80 or byte in (_QUOTE, _BACKSLASH):
            return _NOT_PLAIN
    store8(to, _QUOTE)
    copy_bytes(to + 1, start, end - start)
    store8(to + 1 + end - start, _QUOTE)
    return end - start + 2


@part
def _write_number(value: int, to: int) -> int:
    if value == 0:
        store8(to, _ZERO)
        return 1
    is_negative = value < 0
    # As unsigned, since the smallest int64 has no positive twin.
    left = np.uint64(-value) if is_negative else np.uint64(value)
    digits, rest = 0, left
    while rest:
        rest //= np.uint64(10)
        digits += 1
    if is_negative:
        store8(to, _MINUS)
        to += 1
    for index in range(digits - 1, -1, -1):
        store8(to + index, _ZERO + np.int64(left % np.uint64(10)))
        left //= np.uint64(10)
    return digits + (1 if is_negative else 0)
