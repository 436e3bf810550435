"""Kernels that bring numbers into the order of the rows, and texts into Arrow's buffers."""

import numpy as np
from numpy.typing import NDArray

from perfledger.collectors.wire import columns as at
from perfledger.collectors.wire.columns import Ints, Shorts
from perfledger.collectors.wire.jit import compiled, copy_bytes
from perfledger.collectors.wire.protobuf import Bytes

Words = NDArray[np.uint64]


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
            copy_bytes(to + offsets[index], base + starts[row], lengths[row])
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
