"""Exact look-up of spans by (trace id, span id), for millions of them at once."""

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from perfledger.schema.intervals import Ints

Words = NDArray[np.uint64]


@dataclass(frozen=True)
class SpanIds:
    """Ids as machine words; where `valid` is false the row has no id of the right length."""

    trace_high: Words
    trace_low: Words
    span: Words
    valid: NDArray[np.bool_]

    @classmethod
    def of(cls, trace_id: pl.Series, span_id: pl.Series) -> "SpanIds":
        """Take two binary columns, of 16 and of 8 bytes."""
        trace, trace_valid = _words(trace_id, 2)
        span, span_valid = _words(span_id, 1)
        return cls(trace[:, 0], trace[:, 1], span[:, 0], trace_valid & span_valid)

    def take(self, rows: Ints) -> "SpanIds":
        """Return the ids of some rows."""
        return SpanIds(
            self.trace_high[rows], self.trace_low[rows], self.span[rows], self.valid[rows]
        )

    def __len__(self) -> int:
        return len(self.span)


class SpanIndex:
    """Finds the row of an id. Ids should be unique; of equal ones any row is found."""

    def __init__(self, ids: SpanIds) -> None:
        # Callers choose trace ids: with random factors nobody can make them fall together.
        self._factors = np.random.default_rng().integers(1 << 63, size=3, dtype=np.uint64) * 2 + 1
        self._shift = np.uint64(63 - max(1, len(ids)).bit_length())
        self._ids = ids
        bucket = self._bucket(ids)
        self._rows = np.argsort(bucket, kind="stable")
        buckets = np.arange((1 << (64 - int(self._shift))) + 1)
        self._first = np.searchsorted(bucket[self._rows], buckets)

    def find(self, ids: SpanIds) -> Ints:
        """Return the row of each id in the index, -1 where it is not there."""
        found = np.full(len(ids), -1, np.int64)
        bucket = self._bucket(ids)
        slot, end = self._first[bucket], self._first[bucket + 1]
        asked = np.flatnonzero(ids.valid & (slot < end))
        while len(asked):
            row = self._rows[slot[asked]]
            hit = self._equal(ids, asked, row)
            found[asked[hit]] = row[hit]
            asked = asked[~hit]
            slot[asked] += 1
            asked = asked[slot[asked] < end[asked]]
        return found

    def _bucket(self, ids: SpanIds) -> Ints:
        high, low, span = self._factors
        mixed: Words = ids.trace_high * high + ids.trace_low * low + ids.span * span
        return (mixed >> self._shift).astype(np.int64)

    def _equal(self, ids: SpanIds, asked: Ints, row: Ints) -> NDArray[np.bool_]:
        mine = self._ids
        equal: NDArray[np.bool_] = (mine.span[row] == ids.span[asked]) & mine.valid[row]
        equal &= mine.trace_low[row] == ids.trace_low[asked]
        equal &= mine.trace_high[row] == ids.trace_high[asked]
        return equal


def _words(ids: pl.Series, words: int) -> tuple[Words, NDArray[np.bool_]]:
    """Return the ids as rows of machine words, and which of them have that length."""
    width = 8 * words
    valid = (ids.bin.size() == width).fill_null(False)
    if not valid.all():
        ids = ids.zip_with(valid, pl.Series([bytes(width)]).new_from_index(0, len(ids)))
    # Rows of equal length lie back to back in Arrow's value buffer.
    array = ids.rechunk().to_arrow()
    if not len(array):
        return np.empty((0, words), np.uint64), np.empty(0, np.bool_)
    _, offsets, values = array.buffers()
    first = int(np.frombuffer(offsets, np.int64, 1, 8 * array.offset)[0])
    flat = np.frombuffer(values, np.uint8, len(array) * width, first)
    return flat.view(np.uint64).reshape(-1, words), valid.to_numpy()
