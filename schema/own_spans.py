"""The spans that belong to a request: it is the nearest request above them.

A request may itself be such a span of another one: a prefill instance below a router's request.

Everything becomes columns of integers; ids and names are read as Parquet stores them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from perfledger.schema.encoded_columns import numbered
from perfledger.schema.intervals import Ints
from perfledger.schema.partition_input import KIND, OwnSpans
from perfledger.schema.request_roots import RequestRoots, is_request_root
from perfledger.schema.span_ids import SpanIds, SpanIndex

# Columns of `spans` that are read; a reader should keep the second group encoded.
OWN_COLUMNS: tuple[str, ...] = (
    *("trace_id", "parent_span_id", "start_ns", "end_ns"),
    *("name", "reason"),
)
OWN_ENCODED: tuple[str, ...] = ("name", "reason")

_TIMES = ("start_ns", "end_ns")
_KIND_OF_NAME = {name: kind for name, kind in KIND.items() if name != "held_back"}
_NO_KIND = -1
_DEEPEST = 64  # spans between a span and its request; a cycle ends there


@dataclass(frozen=True)
class RequestSpans:
    """The requests' own spans, and how many distinct waits in the queue each of them had."""

    spans: OwnSpans
    waits: Ints


@dataclass(frozen=True)
class _Part:
    """Spans of one batch that belong to a request, or may: those rows are `nested`."""

    spans: OwnSpans
    nested: Ints
    parents: SpanIds  # of the nested ones


def find_own_spans(
    roots: RequestRoots, tables: Iterable[pa.Table], spans: pl.LazyFrame
) -> RequestSpans:
    """Find the spans that tell of the requests' stages.

    `tables` has OWN_COLUMNS of all spans; `spans` (columns of SPANS) is only asked for what lies
    between a span and its request. Duplicates are harmless.
    """
    traces = _trace_index(roots)
    batches = (batch for table in tables for batch in table.to_batches())
    parts = [_part(roots, traces, batch) for batch in batches]
    nested = [part for part in parts if len(part.nested)]
    if nested:
        owner = _climb(roots, traces, SpanIds.joined(part.parents for part in nested), spans)
        bounds = np.cumsum([len(part.nested) for part in nested])[:-1]
        for part, owners in zip(nested, np.split(owner, bounds), strict=True):
            part.spans.request[part.nested] = owners
    found = _joined([part.spans for part in parts])
    return RequestSpans(found, _count_waits(found, len(roots.rows)))


def _trace_index(roots: RequestRoots) -> SpanIndex:
    """Return an index of the traces that hold requests, to rows of the roots."""
    return SpanIndex(SpanIds.of(roots.rows["trace_id"], roots.rows["span_id"]).traces())


def _part(roots: RequestRoots, traces: SpanIndex, batch: pa.RecordBatch) -> _Part:
    kind = numbered(batch.column("name"), _KIND_OF_NAME, other=_NO_KIND, null=_NO_KIND)
    named = np.flatnonzero(kind != _NO_KIND)
    ids = SpanIds.of_pairs(batch.column("trace_id"), named, batch.column("parent_span_id"), named)
    owner = roots.index.find(ids)
    lost = np.flatnonzero(owner == -1)
    nested = lost[traces.find(ids.take(lost).traces()) >= 0]
    kept = owner >= 0
    kept[nested] = True
    rows = named[kept]
    held = numbered(batch.column("reason"), {"backpressure": 1}, other=0, null=0)[rows] == 1
    kind = kind[rows]
    kind[held & (kind == KIND["stream"])] = KIND["held_back"]
    times = (batch.column(name).to_numpy()[rows] for name in _TIMES)
    place = np.cumsum(kept) - 1
    return _Part(OwnSpans(owner[kept], kind, *times), place[nested], ids.take(nested))


def _joined(parts: list[OwnSpans]) -> OwnSpans:
    """Put spans one after another, without those of nobody; held ones are also streams."""
    none = np.empty(0, np.int64)
    parts = [OwnSpans(none, none.astype(np.int8), none, none), *parts]
    request = np.concatenate([part.request for part in parts])
    kind = np.concatenate([part.kind for part in parts])
    held = np.flatnonzero(kind == KIND["held_back"])
    rows = np.concatenate([np.arange(len(request)), held])
    kind = np.concatenate([kind, np.full(len(held), KIND["stream"], np.int8)])
    start, end = (np.concatenate([getattr(part, name) for part in parts]) for name in _TIMES)
    known = np.flatnonzero(request[rows] >= 0)
    rows = rows[known]
    return OwnSpans(request[rows], kind[known], start[rows], end[rows])


def _climb(
    roots: RequestRoots, traces: SpanIndex, at_parents: SpanIds, spans: pl.LazyFrame
) -> Ints:
    """Follow parent after parent to the nearest request; one that is not in the index ends it."""
    held = np.unique(traces.find(at_parents.traces()))
    names = roots.rows["trace_id"].gather(pl.Series(held)).unique().implode()
    # Of equal ids with different parents any would do, if it is always the same one.
    above = (
        spans.filter(pl.col("trace_id").is_in(names))
        .group_by("trace_id", "span_id")
        .agg(pl.col("parent_span_id").min(), root=is_request_root().fill_null(False).any())
        .collect()
    )
    tree = SpanIndex(SpanIds.of(above["trace_id"], above["span_id"]))
    parents = SpanIds.of(above["trace_id"], above["parent_span_id"])
    ends = above["root"].to_numpy()
    owner_above = np.where(ends, -1, roots.index.find(parents))
    next_above = np.where(ends, -1, tree.find(parents))

    at = tree.find(at_parents)
    owner = np.full(len(at), -1, np.int64)
    for _ in range(_DEEPEST):
        climbing = np.flatnonzero((owner == -1) & (at >= 0))
        owner[climbing] = owner_above[at[climbing]]
        at[climbing] = next_above[at[climbing]]
    return owner


def _count_waits(spans: OwnSpans, requests: int) -> Ints:
    queued = np.flatnonzero(spans.kind == KIND["queue"])
    request, start = spans.request[queued], spans.start_ns[queued]
    order = np.lexsort((start, request))
    request, start = request[order], start[order]
    distinct = np.ones(len(request), np.bool_)
    distinct[1:] = (request[1:] != request[:-1]) | (start[1:] != start[:-1])
    return np.bincount(request[distinct], minlength=requests)
