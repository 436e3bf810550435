"""Kernels that bring numbers into the order of the rows, and texts into Arrow's buffers."""

import numpy as np
from numpy.typing import NDArray

from perfledger.collectors.wire import columns as at
from perfledger.collectors.wire.columns import Ints, Shorts
from perfledger.collectors.wire.jit import (
    compiled,
    copy_bytes,
    load8,
    load64,
    part,
    store8,
    store64,
)
from perfledger.collectors.wire.protobuf import Bytes

Words = NDArray[np.uint64]

PairValues = tuple[Shorts, Bytes, Bytes, Bytes, Bytes, Ints, Bytes]

_SHORT = 64
_KINDS = 7
# By kind of value: which of the texts of `pair_values` it goes to; 0 is the key's.
_LEAF_OF = (0, 1, 0, 0, 0, 2, 3)


@part
def copy_text(to: int, start: int, length: int) -> None:
    """Copy a text between addresses; most are short, and a call of memcpy would cost more."""
    if length > _SHORT:
        copy_bytes(to, start, length)
    elif length >= 8:
        index = 0
        while length - index >= 8:
            store64(to + index, load64(start + index))
            index += 8
        store64(to + length - 8, load64(start + length - 8))
    else:
        for index in range(length):
            store8(to + index, load8(start + index))


@compiled
def texts(data: Bytes, starts: Shorts, lengths: Shorts, rows: Shorts) -> tuple[Shorts, Bytes]:
    """Return Arrow's offsets and bytes of the texts of some rows; row -1 is an empty one."""
    offsets = np.empty(rows.size + 1, np.int32)
    offsets[0] = 0
    for index in range(rows.size):
        row = rows[index]
        offsets[index + 1] = offsets[index] + (lengths[row] if row >= 0 else 0)
    found = np.empty(offsets[-1], np.uint8)
    to, base = np.int64(found.ctypes.data), np.int64(data.ctypes.data)
    for index in range(rows.size):
        row = rows[index]
        if row >= 0:
            copy_text(to + offsets[index], base + starts[row], lengths[row])
    return offsets, found


@compiled
def fixed(data: Bytes, starts: Shorts, size: int) -> Bytes:
    """Return ids of `size` bytes one after another; where the start is negative, zeros."""
    found = np.zeros(starts.size * size, np.uint8)
    to, base = np.int64(found.ctypes.data), np.int64(data.ctypes.data)
    for index in range(starts.size):
        start = starts[index]
        if start >= 0:
            copy_bytes(to + index * size, base + start, size)
    return found


@compiled
def words(data: Bytes, starts: Shorts) -> Words:
    """Return eight bytes at each start as a number that sorts as they do."""
    found = np.empty(starts.size, np.uint64)
    for index in range(starts.size):
        word = np.uint64(0)
        for offset in range(8):
            word = (word << np.uint64(8)) | np.uint64(data[starts[index] + offset])
        found[index] = word
    return found


@compiled
def children(first: Shorts, last: Shorts, parents: Shorts) -> tuple[Shorts, Shorts]:
    """Return list offsets and the children's rows of some parents; theirs are ranges."""
    offsets = np.empty(parents.size + 1, np.int32)
    offsets[0] = 0
    for index in range(parents.size):
        parent = parents[index]
        offsets[index + 1] = offsets[index] + last[parent] - first[parent]
    rows = np.empty(offsets[-1], np.int32)
    for index in range(parents.size):
        child = first[parents[index]]
        for to in range(offsets[index], offsets[index + 1]):
            rows[to] = child
            child += 1
    return offsets, rows


@compiled
def pairs(
    attributes: Shorts, first: Shorts, last: Shorts, owner: int, parents: Shorts
) -> tuple[Shorts, Shorts]:
    """Return list offsets and rows of the attributes that stay pairs, of some parents."""
    owners, fates = attributes[at.OWNER], attributes[at.FATE]
    offsets = np.empty(parents.size + 1, np.int32)
    most = 0
    for index in range(parents.size):
        most += last[parents[index]] - first[parents[index]]
    rows = np.empty(most, np.int32)
    kept = 0
    for index in range(parents.size):
        offsets[index] = kept
        for row in range(first[parents[index]], last[parents[index]]):
            if owners[row] == owner and (fates[row] == at.PAIR or fates[row] == at.ADDED):
                rows[kept] = row
                kept += 1
    offsets[parents.size] = kept
    return offsets, rows[:kept]


@compiled
def pair_values(data: Bytes, attributes: Shorts, numbers: Ints, rows: Shorts) -> PairValues:
    """Return the leaves of a KEY_VALUES column for some attributes, in one pass.

    First offsets and bytes of keys, text, bytes and JSON, then the numbers as they are, then by
    kind of value which rows hold one, as bits.
    """
    offsets = np.zeros((4, rows.size + 1), np.int32)
    for index in range(rows.size):
        row = rows[index]
        for leaf in range(4):
            offsets[leaf, index + 1] = offsets[leaf, index]
        offsets[0, index + 1] += attributes[at.KEY_LENGTH, row]
        leaf = _LEAF_OF[attributes[at.VALUE_KIND, row]]
        if leaf > 0:
            offsets[leaf, index + 1] += attributes[at.VALUE_LENGTH, row]
    keys = np.empty(offsets[0, -1], np.uint8)
    text = np.empty(offsets[1, -1], np.uint8)
    octets = np.empty(offsets[2, -1], np.uint8)
    nested = np.empty(offsets[3, -1], np.uint8)
    starts = (keys.ctypes.data, text.ctypes.data, octets.ctypes.data, nested.ctypes.data)
    base = np.int64(data.ctypes.data)
    values = np.empty(rows.size, np.int64)
    bits = np.zeros((_KINDS, (rows.size + 7) // 8), np.uint8)
    for index in range(rows.size):
        row = rows[index]
        kind = attributes[at.VALUE_KIND, row]
        to = np.int64(starts[0]) + offsets[0, index]
        copy_text(to, base + attributes[at.KEY, row], attributes[at.KEY_LENGTH, row])
        leaf = _LEAF_OF[kind]
        if leaf > 0:
            to = np.int64(starts[leaf]) + offsets[leaf, index]
            copy_text(to, base + attributes[at.VALUE, row], attributes[at.VALUE_LENGTH, row])
        values[index] = numbers[row]
        bits[kind, index >> 3] |= np.uint8(1 << (index & 7))
    return offsets, keys, text, octets, nested, values, bits


@compiled
def promoted(attributes: Shorts, spans: Shorts, order: Shorts, columns: int) -> Shorts:
    """Return for each promoted column and span the attribute that it is, or -1."""
    found = np.full((columns, order.size), -1, np.int32)
    first, last = spans[at.FIRST_ATTRIBUTE], spans[at.LAST_ATTRIBUTE]
    owners, fates = attributes[at.OWNER], attributes[at.FATE]
    for index in range(order.size):
        for row in range(first[order[index]], last[order[index]]):
            if fates[row] >= 0 and owners[row] == at.OF_SPAN:
                found[fates[row], index] = row
    return found


@compiled
def numbers(values: Ints, rows: Shorts) -> Ints:
    """Return the numbers of some rows; row -1 is 0."""
    found = np.zeros(rows.size, np.int64)
    for index in range(rows.size):
        if rows[index] >= 0:
            found[index] = values[rows[index]]
    return found
