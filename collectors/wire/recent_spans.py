"""Which spans have come lately, by a hash of all their bytes: what is sent again is dropped.

Two generations of a hash table hold between half and all of `max_spans`. The hashes of each
segment are also kept as a file beside the log, so that a restart knows them. Losing such a file
costs no data: the reader drops duplicates too.
"""

import secrets
import struct
import zlib
from collections import deque
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfledger.collectors.wire import columns as at
from perfledger.collectors.wire.columns import Shorts
from perfledger.collectors.wire.jit import compiled
from perfledger.collectors.wire.keys import hashes_of
from perfledger.collectors.wire.protobuf import Bytes
from perfledger.collectors.wire.span_batch import SpanBatch

Hashes = NDArray[np.uint64]

DEFAULT_MAX_SPANS = 2_000_000
_FIRST_SLOTS = 1 << 14
# A file for each segment: at one a second these reach back an hour.
_MOST_FILES = 4096
_UNFINISHED = ".writing"
_HEAD = struct.Struct("<8sQQI")
_MAGIC = b"PLRECNT2"


@compiled
def _hashes_of(data: Bytes, starts: Shorts, lengths: Shorts, seed: int) -> Hashes:
    """Return two hashes of the bytes of each span; never both 0, which is an empty slot."""
    found = np.empty((2, starts.size), np.uint64)
    base = np.int64(data.ctypes.data)
    for index in range(starts.size):
        start, length = base + starts[index], np.int64(lengths[index])
        one, two = hashes_of(start, length, seed)
        found[0, index], found[1, index] = one | np.uint64(1), two
    return found


@compiled
def _take_new(hashes: Hashes, first: Hashes, second: Hashes, is_new: NDArray[np.bool_]) -> int:
    """Put hashes into the first table; say which neither held, and return how many."""
    added = 0
    for index in range(hashes.shape[1]):
        one, two = hashes[0, index], hashes[1, index]
        is_new[index] = False
        if _slot_of(one, two, second) >= 0:
            continue
        slot = _slot_of(one, two, first)
        if slot < 0:
            first[-1 - slot, 0], first[-1 - slot, 1] = one, two
            is_new[index] = True
            added += 1
    return added


@compiled
def _slot_of(one: int, two: int, table: Hashes) -> int:
    """Return the slot of a pair, or -1 - the free slot where it would be."""
    mask = np.uint64(table.shape[0] - 1)
    slot = (one ^ two) & mask
    while table[slot, 0] or table[slot, 1]:
        if table[slot, 0] == one and table[slot, 1] == two:
            return np.int64(slot)
        slot = (slot + np.uint64(1)) & mask
    return -1 - np.int64(slot)


class RecentSpans:
    """Not for several threads at once."""

    def __init__(self, folder: Path, max_spans: int = DEFAULT_MAX_SPANS) -> None:
        self._folder = folder
        self._generation_spans = max(1, max_spans // 2)
        self._seed = secrets.randbits(63)
        self._current = np.zeros((_FIRST_SLOTS, 2), np.uint64)
        self._before = np.zeros((1, 2), np.uint64)
        self._held = 0
        self._files: deque[tuple[Path, int]] = deque()

    def load(self) -> None:
        """Take the hashes that an earlier process left; what is damaged is removed."""
        for path in self._folder.glob(f"*{_UNFINISHED}"):
            path.unlink(missing_ok=True)
        paths = sorted(self._folder.glob("*.ids"))
        for path in paths[:-_MOST_FILES]:
            path.unlink(missing_ok=True)
        for path in paths[-_MOST_FILES:]:
            found = _read(path)
            if found is None or (self._files and found[0] != self._seed):
                with suppress(OSError):
                    path.unlink()
                continue
            self._seed = found[0]
            self._take(found[1], were_new=True)
            self._files.append((path, found[1].shape[1]))

    def take_new(self, batch: SpanBatch) -> tuple[NDArray[np.bool_], Hashes]:
        """Return which spans of a batch are new, by row, and the hashes of all."""
        spans = batch.columns.spans[:, : batch.rows]
        hashes = _hashes_of(batch.columns.data, spans[at.BODY], spans[at.BODY_LENGTH], self._seed)
        return self._take(hashes), hashes

    def remember(self, segment: str, hashes: Hashes) -> None:
        """Keep the hashes of a segment for a restart; raises OSError where they cannot be."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{segment}.ids"
        content = hashes.tobytes()
        head = _HEAD.pack(_MAGIC, self._seed, hashes.shape[1], zlib.crc32(content))
        scratch = path.with_suffix(_UNFINISHED)
        try:
            scratch.write_bytes(head + content)
            scratch.rename(path)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
        self._files.append((path, hashes.shape[1]))
        while len(self._files) > _MOST_FILES or self._kept > 2 * self._generation_spans:
            self._files.popleft()[0].unlink(missing_ok=True)

    @property
    def _kept(self) -> int:
        return sum(count for _, count in self._files)

    def _take(self, hashes: Hashes, *, were_new: bool = False) -> NDArray[np.bool_]:
        """Return which are new. Those that `were_new` are of this generation, whatever came before:
        they had been forgotten when they came."""
        is_new = np.empty(hashes.shape[1], np.bool_)
        for start in range(0, hashes.shape[1], self._generation_spans):
            part = hashes[:, start : start + self._generation_spans]
            self._make_room(part.shape[1])
            first = is_new[start : start + part.shape[1]]
            before = np.zeros((1, 2), np.uint64) if were_new else self._before
            self._held += _take_new(np.ascontiguousarray(part), self._current, before, first)
        return is_new

    def _make_room(self, more: int) -> None:
        """Grow the table, or begin the next generation, so that half of it stays free."""
        if self._held and self._held + more > self._generation_spans:
            self._before, self._held = self._current, 0
            self._current = np.zeros((_FIRST_SLOTS, 2), np.uint64)
        slots = self._current.shape[0]
        while slots < 2 * (self._held + more):
            slots *= 2
        if slots != self._current.shape[0]:
            old = self._current[self._current.any(axis=1)]
            self._current = np.zeros((slots, 2), np.uint64)
            nothing = np.zeros((1, 2), np.uint64)
            _take_new(np.ascontiguousarray(old.T), self._current, nothing, np.empty(len(old), bool))


def _read(path: Path) -> tuple[int, Hashes] | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if len(content) < _HEAD.size:
        return None
    magic, seed, count, checksum = _HEAD.unpack_from(content)
    body = content[_HEAD.size :]
    if magic != _MAGIC or len(body) != 16 * count or zlib.crc32(body) != checksum:
        return None
    return seed, np.frombuffer(body, np.uint64).reshape(2, count)
