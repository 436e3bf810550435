"""Protobuf's wire format, each read checked against the end of what it reads from.

A position is an address; -1 says that what stood there is malformed. The rules are
those of the official parser (protobuf.dev, "Encoding"): varints of at most 10 bytes, tags and
lengths of at most 5, field numbers from 1, groups closed by their own number.
"""

import numpy as np
from numpy.typing import NDArray

from perfledger.collectors.wire.jit import load8, load32, load64, part, store8

Bytes = NDArray[np.uint8]

VARINT, FIXED64, LENGTH, GROUP, GROUP_END, FIXED32 = range(6)
_DEEPEST_GROUP = 100
_LARGEST_TAG = 2**32 - 1


@part
def read_varint(position: int, end: int) -> tuple[int, int]:
    """Return (value as int64, position behind it)."""
    value, shift = np.int64(0), np.int64(0)
    if position < end:
        byte = load8(position)
        if byte < 0x80:
            return byte, position + 1
    while position < end:
        byte = load8(position)
        position += 1
        if shift == 63 and byte >= 0x80:
            return np.int64(0), np.int64(-1)
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    return np.int64(0), np.int64(-1)


@part
def next_field(position: int, end: int) -> tuple[int, int, int, int]:
    """Return (field number, wire type, value, position behind it); position -1: malformed.

    The value of LENGTH is where its payload starts, and the position is where it ends. A group
    has been passed over when it is returned; an end of a group is malformed.
    """
    tag, position = _read_tag(position, end)
    if position < 0 or tag < 8:
        return 0, 0, 0, -1
    field, wire, value = tag >> 3, tag & 7, np.int64(0)
    if wire == LENGTH:
        value, position = _read_length(position, end)
    elif wire == VARINT:
        value, position = read_varint(position, end)
    elif wire in (FIXED64, FIXED32):
        size = 8 if wire == FIXED64 else 4
        if end - position < size:
            return 0, 0, 0, -1
        value = load64(position) if wire == FIXED64 else load32(position)
        position += size
    elif wire == GROUP:
        position = _skip_group(position, end, field)
    else:
        position = -1
    return field, wire, value, position


@part
def _read_tag(position: int, end: int) -> tuple[int, int]:
    """Return (tag, position behind it); position -1: malformed."""
    start = position
    tag, position = read_varint(position, end)
    if position - start > 5 or tag < 0 or tag > _LARGEST_TAG:
        return np.int64(0), np.int64(-1)
    return tag, position


@part
def _read_length(position: int, end: int) -> tuple[int, int]:
    """Return where a payload starts, behind its length, and where it ends; -1: malformed."""
    start = position
    length, position = read_varint(position, end)
    if position < 0 or position - start > 5 or length < 0 or length > end - position:
        return np.int64(0), np.int64(-1)
    return np.int64(position), np.int64(position + length)


@part
def _skip_group(position: int, end: int, field: int) -> int:
    """Return the position behind the end of the group with this field number, or -1.

    Nobody reads what is in it: as in the official parser, field number 0 passes there.
    """
    open_groups = np.empty(_DEEPEST_GROUP, np.int64)
    open_groups[0] = field
    depth = 1
    while depth:
        tag, position = _read_tag(position, end)
        if position < 0:
            return -1
        wire = tag & 7
        if wire == GROUP:
            if depth == _DEEPEST_GROUP:
                return -1
            open_groups[depth] = tag >> 3
            depth += 1
        elif wire == GROUP_END:
            depth -= 1
            if open_groups[depth] != tag >> 3:
                return -1
        elif wire == LENGTH:
            _, position = _read_length(position, end)
        elif wire == VARINT:
            _, position = read_varint(position, end)
        elif wire in (FIXED64, FIXED32):
            position += 8 if wire == FIXED64 else 4
        else:
            return -1
        if position < 0 or position > end:
            return -1
    return position


@part
def fill(start: int, end: int, byte: int) -> None:
    """Overwrite bytes."""
    for position in range(start, end):
        store8(position, byte)
