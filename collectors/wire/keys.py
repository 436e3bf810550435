"""Attribute keys seen so far, each with what is to become of its values.

A key is looked at once in Python, which knows the deny-list and the promoted columns; from then
on kernels find it here. The table is emptied when it has grown too large: keys come from outside.
"""

import secrets
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from perfledger.collectors.attribute_values import DENIED, AttributeReader
from perfledger.collectors.wire.columns import KEY, KEY_LENGTH, PAIR, Columns, Shorts
from perfledger.collectors.wire.jit import compiled, load8, load64, part
from perfledger.collectors.wire.protobuf import Bytes
from perfledger.schema.attributes import LINK_ATTRIBUTES, SPAN_ATTRIBUTES

# Columns of `spans` that a span's attribute may have for itself, in the order of their numbers.
PROMOTED = tuple(a.column for a in SPAN_ATTRIBUTES if a.column)
_PROMOTED_NUMBER = {a.name: PROMOTED.index(a.column) for a in SPAN_ATTRIBUTES if a.column}
# What a link's attribute may become.
PHASE, TOKENS = 0, 1
_LINK_NUMBER = {a.name: (PHASE, TOKENS)[a.column == "tokens"] for a in LINK_ATTRIBUTES if a.column}

_MOST_KEYS = 8192
_NO_ENTRY = -1
_SCATTER = np.uint64(0x9E3779B97F4A7C15)

# Rows of `Keys.entries`.
START, LENGTH, IS_DENIED, IS_CHANGED, ON_SPAN, ON_LINK, KEPT = range(7)


class Keys(NamedTuple):
    """An open-addressing hash table. `slots` hold entry numbers; its size is a power of two."""

    text: Bytes
    slots: Shorts
    hashes: NDArray[np.uint64]
    entries: Shorts
    following: Shorts
    seed: NDArray[np.uint64]

    def for_kernels(self) -> tuple[object, ...]:
        """Return what `find` takes: the text by its address."""
        return (self.text.ctypes.data, *self[1:])


@intrinsic
def _product(context: Any, one: Any, other: Any) -> Any:
    """Return both halves of the 128-bit product of two numbers, one xor the other."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(factor, wide) for factor in arguments))
        halves = builder.xor(product, builder.lshr(product, ir.Constant(wide, 64)))
        return builder.trunc(halves, ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), generate


@compiled
def hash_of(start: int, length: int, seed: int) -> int:
    """Return a hash; the random seed keeps senders from choosing texts that collide.

    What each word does depends on a factor made of the seed: with a known one, differences that
    cancel could be told in advance, whatever the seed.
    """
    value = np.uint64(seed) ^ np.uint64(length)
    factor = _product(np.uint64(seed) ^ _SCATTER, _SCATTER) | np.uint64(1)
    position, end = start, start + length
    while position < end:
        if end - position >= 8:
            value = _product(value ^ np.uint64(load64(position)), factor)
            position += 8
        else:
            value = _product(value ^ np.uint64(load8(position)), factor)
            position += 1
    return _product(value ^ _SCATTER, factor)


@part
def hashes_of(start: int, length: int, seed: int) -> tuple[int, int]:
    """Return `hash_of` for a seed and for its complement: each waits for its last product, so that
    two at once cost little more than one."""
    one, other = np.uint64(seed), ~np.uint64(seed)
    factor = _product(one ^ _SCATTER, _SCATTER) | np.uint64(1)
    other_factor = _product(other ^ _SCATTER, _SCATTER) | np.uint64(1)
    one, other = one ^ np.uint64(length), other ^ np.uint64(length)
    position, end = start, start + length
    while end - position >= 8:
        word = np.uint64(load64(position))
        one, other = _product(one ^ word, factor), _product(other ^ word, other_factor)
        position += 8
    while position < end:
        byte = np.uint64(load8(position))
        one, other = _product(one ^ byte, factor), _product(other ^ byte, other_factor)
        position += 1
    return _product(one ^ _SCATTER, factor), _product(other ^ _SCATTER, other_factor)


@part
def is_equal(one: int, other: int, length: int) -> bool:
    """Return whether bytes at two addresses are equal."""
    different, index = np.int64(0), 0
    while length - index >= 8:
        different |= load64(one + index) ^ load64(other + index)
        index += 8
    if index < length and length >= 8:
        different |= load64(one + length - 8) ^ load64(other + length - 8)
        index = length
    while index < length:
        different |= load8(one + index) ^ load8(other + index)
        index += 1
    return different == 0


@part
def is_entry(start: int, length: int, text: int, entries: Shorts, entry: int) -> bool:
    if entries[LENGTH, entry] != length:
        return False
    return is_equal(start, text + entries[START, entry], length)


@compiled
def find(
    start: int,
    length: int,
    after: int,
    text: int,
    slots: Shorts,
    hashes: NDArray[np.uint64],
    entries: Shorts,
    following: Shorts,
    seed: NDArray[np.uint64],
) -> int:
    """Return the entry of a key, or -1, and note that it has followed `after`."""
    value = hash_of(start, length, seed[0])
    mask = np.uint64(slots.size - 1)
    slot = value & mask
    while True:
        entry = slots[slot]
        if entry < 0:
            return _NO_ENTRY
        if hashes[entry] == value and is_entry(start, length, text, entries, entry):
            following[after] = entry
            return entry
        slot = (slot + np.uint64(1)) & mask


class KeyTable:
    """Grows while a request is read; `arrays` are what kernels take."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._begin()

    def _begin(self) -> None:
        self.arrays = _empty(1024, 64 * 1024)
        # By owner and key: for whom it was seen last, and in which row.
        self.seen = np.full((3, 1024), -1, np.int64)
        self.seen_at = np.zeros((3, 1024), np.int32)
        self._entries = 0
        self._text_bytes = 0

    def forget_if_large(self) -> None:
        """Start anew between two requests where too much is remembered."""
        if self._entries > _MOST_KEYS or self._text_bytes > _MOST_KEYS * 64:
            self._begin()

    def text_of(self, entry: int) -> str:
        """Return the key of an entry that is kept as it is, as text."""
        start, length = self.arrays.entries[[START, LENGTH], entry].tolist()
        return self.arrays.text[start : start + length].tobytes().decode()

    def entry_of(self, key: bytes) -> int:
        """Return the entry of a key; one that is new is added and decided on."""
        sought = np.frombuffer(key or b"\0", np.uint8)
        found = int(find(sought.ctypes.data, len(key), 0, *self.arrays.for_kernels()))
        return found if found >= 0 else self._learn(key)

    def _learn(self, key: bytes) -> int:
        reader = AttributeReader(self._limit_bytes)
        kept = reader.key(key)
        entry = self._add(key)
        entries = self.arrays.entries
        entries[IS_DENIED, entry] = kept is DENIED
        entries[ON_SPAN, entry] = _PROMOTED_NUMBER.get(kept, PAIR)
        entries[ON_LINK, entry] = _LINK_NUMBER.get(kept, PAIR)
        entries[KEPT, entry] = entry
        is_changed = kept is not DENIED and kept.encode() != key
        entries[IS_CHANGED, entry] = is_changed
        if is_changed:
            # Keys that become equal once cut or repaired are equal.
            of_kept = self.entry_of(kept.encode())
            self.arrays.entries[KEPT, entry] = of_kept
        return entry

    def _add(self, key: bytes) -> int:
        entry, start = self._entries, self._text_bytes
        if entry + 1 >= self.arrays.entries.shape[1] or start + len(key) > self.arrays.text.size:
            self._grow(len(key))
        arrays = self.arrays
        arrays.text[start : start + len(key)] = np.frombuffer(key, np.uint8)
        arrays.entries[:, entry] = 0
        arrays.entries[START, entry], arrays.entries[LENGTH, entry] = start, len(key)
        address = arrays.text.ctypes.data + start
        arrays.hashes[entry] = hash_of(address, len(key), arrays.seed[0])
        _put(arrays.slots, arrays.hashes, entry)
        self._entries += 1
        self._text_bytes += len(key)
        return entry

    def _grow(self, text_bytes: int) -> None:
        old = self.arrays
        size = old.entries.shape[1]
        self.arrays = _empty(2 * size, 2 * old.text.size + text_bytes, old.seed)
        self.arrays.text[: old.text.size] = old.text
        self.arrays.hashes[:size] = old.hashes
        self.arrays.entries[:, :size] = old.entries
        self.arrays.following[:size] = old.following
        self.seen = np.pad(self.seen, ((0, 0), (0, size)), constant_values=-1)
        self.seen_at = np.pad(self.seen_at, ((0, 0), (0, size)))
        for entry in range(self._entries):
            _put(self.arrays.slots, self.arrays.hashes, entry)


class KeyCodes:
    """Numbers of keys in one batch, by their entries in the table; -1 is none."""

    def __init__(self) -> None:
        self._seed: object = None
        self._codes = np.empty(0, np.int32)

    def of(self, table: KeyTable) -> Shorts:
        """Return the numbers with room for all entries of the table, none if it began anew."""
        arrays = table.arrays
        if self._seed is not arrays.seed:
            self._seed, self._codes = arrays.seed, np.empty(0, np.int32)
        more = arrays.entries.shape[1] - self._codes.size
        if more:
            self._codes = np.pad(self._codes, (0, more), constant_values=-1)
        return self._codes

    def forget(self, entries: Shorts) -> None:
        """Let keys have no number again; it may be that of another one, if the table began anew."""
        self._codes[entries[entries < self._codes.size]] = -1


def _empty(keys: int, text_bytes: int, seed: NDArray[np.uint64] | None = None) -> Keys:
    return Keys(
        text=np.empty(text_bytes, np.uint8),
        slots=np.full(4 * keys, _NO_ENTRY, np.int32),
        hashes=np.zeros(keys, np.uint64),
        # An entry whole in memory: what is looked at together lies together.
        entries=np.zeros((7, keys), np.int32, order="F"),
        following=np.full(keys, _NO_ENTRY, np.int32),
        seed=np.array([secrets.randbits(64)], np.uint64) if seed is None else seed,
    )


@compiled
def _put(slots: Shorts, hashes: NDArray[np.uint64], entry: int) -> None:
    mask = np.uint64(slots.size - 1)
    slot = hashes[entry] & mask
    while slots[slot] >= 0:
        slot = (slot + np.uint64(1)) & mask
    slots[slot] = entry


def key_at(columns: Columns, row: int) -> bytes:
    """Return the key of an attribute as it was sent."""
    start = columns.attributes[KEY, row]
    return columns.data[start : start + columns.attributes[KEY_LENGTH, row]].tobytes()
