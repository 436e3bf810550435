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
    prefetch,
    store8,
    store64,
)
from perfledger.collectors.wire.protobuf import Bytes

Words = NDArray[np.uint64]

Pairs = tuple[Shorts, Shorts, Shorts, Ints, Shorts, Shorts, Bytes, Ints]
Promoted = tuple[Shorts, Shorts, Ints]

_SHORT = 64
_KINDS = 7
_LONGEST_RUN = 256
# What is wanted so many rows later is asked for: spans are read in another order than they came,
# and waiting for memory took three quarters of the time.
_AHEAD = 8
_LINE, _ROW_BYTES = 64, 4 * at.ATTRIBUTE_FIELDS
_ROWS_A_LINE, _MOST_AHEAD = _LINE // _ROW_BYTES, 64


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
def in_order(table: Shorts, rows: Shorts) -> Shorts:
    """Return some rows of a table of fields, field after field."""
    found = np.empty((table.shape[0], rows.size), np.int32)
    base, width = np.int64(table.ctypes.data), 4 * table.shape[0]
    for index in range(rows.size):
        if index + _AHEAD < rows.size:
            for at_ in range(0, width, _LINE):
                prefetch(base + width * rows[index + _AHEAD] + at_)
        for field in range(table.shape[0]):
            found[field, index] = table[field, rows[index]]
    return found


@compiled
def texts(data: Bytes, starts: Shorts, lengths: Shorts) -> tuple[Shorts, Bytes]:
    """Return Arrow's offsets and bytes of some texts; one without a start is empty."""
    offsets = np.empty(starts.size + 1, np.int32)
    offsets[0] = 0
    for index in range(starts.size):
        offsets[index + 1] = offsets[index] + (lengths[index] if starts[index] >= 0 else 0)
    found = np.empty(offsets[-1], np.uint8)
    to, base = np.int64(found.ctypes.data), np.int64(data.ctypes.data)
    for index in range(starts.size):
        if index + _AHEAD < starts.size:
            prefetch(base + starts[index + _AHEAD])
        if starts[index] >= 0:
            copy_text(to + offsets[index], base + starts[index], lengths[index])
    return offsets, found


@compiled
def fixed(data: Bytes, starts: Shorts, size: int) -> Bytes:
    """Return ids of `size` bytes one after another; where the start is negative, zeros."""
    found = np.zeros(starts.size * size, np.uint8)
    to, base = np.int64(found.ctypes.data), np.int64(data.ctypes.data)
    for index in range(starts.size):
        start = starts[index]
        if index + _AHEAD < starts.size:
            prefetch(base + starts[index + _AHEAD])
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
def sort_runs(order: Shorts, high: Words, low: Words, starts_ns: Ints) -> bool:
    """Sort rows that are sorted by `high` by the rest too, and at last as they came.

    Returns False, and has done a part, where a run of equal ones is long.
    """
    begin = 0
    for index in range(order.size):
        row = order[index]
        if high[row] != high[order[begin]]:
            begin = index
        if index - begin > _LONGEST_RUN:
            return False
        place = index
        while place > begin and _is_before(row, order[place - 1], low, starts_ns):
            order[place] = order[place - 1]
            place -= 1
        order[place] = row
    return True


@part
def _is_before(row: int, other: int, low: Words, starts_ns: Ints) -> bool:
    if low[row] != low[other]:
        return low[row] < low[other]
    if starts_ns[row] != starts_ns[other]:
        return starts_ns[row] < starts_ns[other]
    return row < other


@compiled
def children(first: Shorts, last: Shorts) -> tuple[Shorts, Shorts]:
    """Return list offsets and the children's rows of some parents; theirs are ranges."""
    offsets = np.empty(first.size + 1, np.int32)
    offsets[0] = 0
    for index in range(first.size):
        offsets[index + 1] = offsets[index] + last[index] - first[index]
    rows = np.empty(offsets[-1], np.int32)
    for index in range(first.size):
        child = first[index]
        for to in range(offsets[index], offsets[index + 1]):
            rows[to] = child
            child += 1
    return offsets, rows


@compiled
def attributes_of(
    attributes: Shorts,
    numbers: Ints,
    keys: Shorts,
    names: int,
    owner: int,
    first: Shorts,
    last: Shorts,
    promoted: int,
) -> tuple[Pairs, Promoted]:
    """Return the attributes of some parents, in one pass: memory is what this costs.

    Of pairs: list offsets; the keys' codes and which of the batch's `names` they stand for; numbers
    as they are; starts and lengths of texts; by kind of value which pairs have one, as bits; and by
    kind how many there are and the bytes of their texts. Of the first `promoted` columns: starts,
    -1 where there is none, lengths and numbers.
    """
    most = 0
    for index in range(first.size):
        most += last[index] - first[index]
    offsets = np.empty(first.size + 1, np.int32)
    codes, code_of = np.empty(most, np.int32), np.full(names, -1, np.int32)
    used, many, kept = np.empty(names, np.int32), 0, 0
    values = np.empty(most, np.int64)
    starts, lengths = np.empty(most, np.int32), np.empty(most, np.int32)
    bits, sums = np.zeros((_KINDS, most // 8 + 1), np.uint8), np.zeros((2, _KINDS), np.int64)
    own_starts = np.full((promoted, first.size), -1, np.int32)
    own_lengths = np.zeros((promoted, first.size), np.int32)
    own_values = np.zeros((promoted, first.size), np.int64)
    base, number, key = attributes.ctypes.data, numbers.ctypes.data, keys.ctypes.data
    for index in range(first.size):
        if index + _AHEAD < first.size:
            begin = np.int64(first[index + _AHEAD])
            end = min(np.int64(last[index + _AHEAD]), begin + _MOST_AHEAD)
            for row in range(begin, end, _ROWS_A_LINE):
                prefetch(np.int64(base) + _ROW_BYTES * row)
            for row in range(begin, end, 2 * _ROWS_A_LINE):
                prefetch(np.int64(number) + 8 * row)
                prefetch(np.int64(key) + 4 * row)
        offsets[index] = kept
        for row in range(first[index], last[index]):
            if attributes[at.OWNER, row] != owner:
                continue
            fate = attributes[at.FATE, row]
            if fate == at.PAIR or fate == at.ADDED:
                kind, length = attributes[at.VALUE_KIND, row], attributes[at.VALUE_LENGTH, row]
                name = keys[row]
                if code_of[name] < 0:
                    code_of[name], used[many] = many, name
                    many += 1
                codes[kept], values[kept] = code_of[name], numbers[row]
                starts[kept], lengths[kept] = attributes[at.VALUE, row], length
                bits[kind, kept >> 3] |= np.uint8(1 << (kept & 7))
                sums[0, kind] += 1
                sums[1, kind] += length
                kept += 1
            elif 0 <= fate < promoted:
                own_starts[fate, index] = attributes[at.VALUE, row]
                own_lengths[fate, index] = attributes[at.VALUE_LENGTH, row]
                own_values[fate, index] = numbers[row]
    offsets[first.size] = kept
    pairs = (offsets, codes[:kept], used[:many], values, starts, lengths, bits, sums)
    return pairs, (own_starts, own_lengths, own_values)


@compiled
def texts_of_kind(
    data: Bytes, starts: Shorts, lengths: Shorts, bits: Bytes, rows: int, size_bytes: int
) -> tuple[Shorts, Bytes]:
    """Return Arrow's offsets and bytes of the texts of those rows whose bit is set."""
    offsets, found = np.empty(rows + 1, np.int32), np.empty(size_bytes, np.uint8)
    to, base, filled = np.int64(found.ctypes.data), np.int64(data.ctypes.data), 0
    for index in range(rows):
        offsets[index] = filled
        if index + 2 * _AHEAD < rows:
            prefetch(base + starts[index + 2 * _AHEAD])
        if bits[index >> 3] >> (index & 7) & 1:
            copy_text(to + filled, base + starts[index], lengths[index])
            filled += lengths[index]
    offsets[rows] = filled
    return offsets, found
