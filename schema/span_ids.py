"""Exact look-up of spans by (trace id, span id), for millions of them at once."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pyarrow as pa
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
        everything = slice(len(span_id))
        trace_ids, span_ids = trace_id.rechunk().to_arrow(), span_id.rechunk().to_arrow()
        return cls.of_pairs(trace_ids, everything, span_ids, everything)

    @classmethod
    def of_pairs(
        cls, trace_id: pa.Array, trace_row: Ints | slice, span_id: pa.Array, span_row: Ints | slice
    ) -> "SpanIds":
        """Take ids from binary arrays by row; the row behind the last one is no id."""
        trace, trace_valid = _words(trace_id, 2)
        span, span_valid = _words(span_id, 1)
        return cls(
            trace[trace_row, 0],
            trace[trace_row, 1],
            span[span_row, 0],
            trace_valid[trace_row] & span_valid[span_row],
        )

    def take(self, rows: Ints) -> "SpanIds":
        """Return the ids of some rows."""
        return SpanIds(
            self.trace_high[rows], self.trace_low[rows], self.span[rows], self.valid[rows]
        )

    def traces(self) -> "SpanIds":
        """Return the trace ids alone, with one span id for all."""
        return replace(self, span=np.zeros_like(self.span))

    @classmethod
    def joined(cls, parts: Iterable["SpanIds"]) -> "SpanIds":
        """Put ids one after another; there is at least one part."""
        columns = zip(*((p.trace_high, p.trace_low, p.span, p.valid) for p in parts), strict=True)
        return cls(*map(np.concatenate, columns))

    def __len__(self) -> int:
        return len(self.span)


def may_be_repeated(span_ids: Iterable[pa.ChunkedArray]) -> list[Ints]:
    """Return for each file of span ids the rows whose id occurs again, in whatever trace."""
    files = [
        np.concatenate([np.empty(0, np.uint64), *(_fixed_words(c, 1)[:, 0] for c in ids.chunks)])
        for ids in span_ids
    ]
    ordered = np.sort(np.concatenate([np.empty(0, np.uint64), *files]))
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(repeated):
        return [np.empty(0, np.int64)] * len(files)
    return [np.flatnonzero(np.isin(ids, repeated)) for ids in files]


class SpanIndex:
    """Finds the row of an id. Ids should be unique; of equal ones any row is found."""

    def __init__(self, ids: SpanIds) -> None:
        self._factors = _random_factors()
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
        return (_mix(ids, self._factors) >> self._shift).astype(np.int64)

    def _equal(self, ids: SpanIds, asked: Ints, row: Ints) -> NDArray[np.bool_]:
        mine = self._ids
        equal: NDArray[np.bool_] = (mine.span[row] == ids.span[asked]) & mine.valid[row]
        equal &= mine.trace_low[row] == ids.trace_low[asked]
        equal &= mine.trace_high[row] == ids.trace_high[asked]
        return equal


def _random_factors() -> Words:
    # Callers choose trace ids: with random factors nobody can make them fall together.
    return np.random.default_rng().integers(1 << 63, size=3, dtype=np.uint64) * 2 + 1


def _mix(ids: SpanIds, factors: Words) -> Words:
    high, low, span = factors
    mixed: Words = ids.trace_high * high + ids.trace_low * low + ids.span * span
    return mixed


def _words(ids: pa.Array, words: int) -> tuple[Words, NDArray[np.bool_]]:
    """Return ids as rows of machine words, and which of them have that length; one more is none."""
    found = np.zeros((len(ids) + 1, words), np.uint64)
    valid = np.zeros(len(ids) + 1, np.bool_)
    if ids.type == pa.binary(8 * words):
        found[:-1] = _fixed_words(ids, words)
        valid[:-1] = _present(ids)
    else:
        found[:-1], valid[:-1] = _variable_words(ids, words)
    return found, valid


def _fixed_words(ids: pa.FixedSizeBinaryArray, words: int) -> Words:
    if not len(ids):
        return np.empty((0, words), np.uint64)
    first = ids.offset * 8 * words
    flat = np.frombuffer(ids.buffers()[1], np.uint64, len(ids) * words, first)
    return flat.reshape(-1, words)


def _present(ids: pa.Array) -> NDArray[np.bool_]:
    bits = ids.buffers()[0]
    if bits is None:
        return np.ones(len(ids), np.bool_)
    unpacked = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return unpacked[ids.offset : ids.offset + len(ids)].astype(np.bool_)


def _variable_words(ids: pa.Array, words: int) -> tuple[Words, NDArray[np.bool_]]:
    """Read ids that may have any length."""
    width = 8 * words
    _, offsets, values = ids.buffers()
    wide = np.int64 if ids.type == pa.large_binary() else np.int32
    offset = np.frombuffer(offsets or bytes(8), wide)[ids.offset : ids.offset + len(ids) + 1]
    data = np.frombuffer(values or b"", np.uint8)
    valid = np.diff(offset) == width  # a null has no length
    if valid.all():  # rows of equal length lie back to back
        return data[offset[0] : offset[-1]].view(np.uint64).reshape(-1, words), valid
    found = np.zeros((len(ids), words), np.uint64)
    flat = data[offset[:-1][valid][:, None] + np.arange(width)].ravel()
    found[valid] = flat.view(np.uint64).reshape(-1, words)
    return found, valid
