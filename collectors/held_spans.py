"""Spans on their way through settling: as they arrived, as they are held, and whose they are."""

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from perfledger.collectors.derived_rows import empty_rows
from perfledger.schema.attributes import STEP_NAMES
from perfledger.schema.intervals import Ints
from perfledger.schema.request_roots import is_request_root
from perfledger.schema.span_ids import SpanIds, SpanIndex
from perfledger.schema.tables import SPANS

# Columns that nothing derived is made from, or only from those of steps: most of the bytes.
NEVER_READ = ("resource_attributes", "events", "status_message", "trace_state")
_READ_OF_STEPS = ("attributes", "links")
_TOLD_BY = ["name", "kind", "operation", "model"]
_DEEPEST = 64  # spans between a span and its request

_EMPTY_SPANS = empty_rows(SPANS)


@dataclass(frozen=True)
class Arrived:
    """Spans that came together, narrow; `matters` is whether one is a request's root or a step."""

    rows: pa.Table
    seen_ns: int
    matters: bool

    @classmethod
    def of(cls, spans: pa.Table, seen_ns: int) -> "Arrived":
        """Return spans (columns of SPANS) without what nothing is derived from."""
        is_step = pc.is_in(spans["name"], value_set=pa.array(sorted(STEP_NAMES)))
        has_steps = pc.any(is_step).as_py() or False
        has_roots = pl.DataFrame(spans.select(_TOLD_BY)).select(is_request_root().any()).item()
        rows = spans.drop_columns([*NEVER_READ, *_READ_OF_STEPS])
        if has_steps:
            kept = pc.if_else(is_step, pa.array(range(spans.num_rows)), None)
            for name in _READ_OF_STEPS:
                rows = rows.append_column(name, spans[name].take(kept))
        return cls(rows, seen_ns, has_steps or bool(has_roots))

    def frame(self) -> pl.DataFrame:
        """Return the rows with all columns of SPANS, null where nothing is read."""
        kinds = _EMPTY_SPANS.schema
        frame = pl.DataFrame(self.rows)
        missing = [pl.lit(None, kinds[n]).alias(n) for n in kinds if n not in frame.columns]
        return held_rows(
            frame.with_columns(missing).select(SPANS.names()).cast(kinds), self.seen_ns
        )

    def last_ns(self) -> int:
        """Return when the last span ended; a nonsense end in the future counts as arrived."""
        ends = pc.min_element_wise(self.rows["end_ns"], self.rows["received_ns"])
        return int(pc.max(ends).as_py())


def held_rows(rows: pl.DataFrame, seen_ns: int) -> pl.DataFrame:
    """Return rows with when they came, as `seen_ns`."""
    return rows.with_columns(seen_ns=pl.lit(seen_ns, dtype=pl.Int64))


def rows_since(held: pl.DataFrame, oldest_ns: int) -> pl.DataFrame:
    """Return the rows seen at or after a time; rows are held in the order in which they came."""
    if held.is_empty() or held["seen_ns"][0] >= oldest_ns:
        return held
    return held.filter(pl.col("seen_ns") >= oldest_ns)


def owners_of(spans: pl.DataFrame) -> Ints:
    """Return for each span the row of the request above it or at it, -1 where there is none."""
    is_root = spans.select(is_request_root().fill_null(False)).to_series().to_numpy()
    index = SpanIndex(SpanIds.of(spans["trace_id"], spans["span_id"]))
    parent = index.find(SpanIds.of(spans["trace_id"], spans["parent_span_id"]))
    at = np.arange(len(spans))
    for _ in range(_DEEPEST):
        climbing = np.flatnonzero((at >= 0) & ~is_root[at])
        if not len(climbing):
            break
        at[climbing] = parent[at[climbing]]
    at[~is_root[at]] = -1
    return at
