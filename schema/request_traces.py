"""Requests with what belongs to them: their own spans, found through parents, and their steps.

A request is a server span of an LLM operation, keyed by (trace id, span id): one trace may hold
many. A span belongs to the nearest request above it. Everything becomes columns of integers.
Duplicates (spans sent twice) are harmless.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from perfledger.schema.attributes import REQUEST_ROOTS
from perfledger.schema.intervals import Ints
from perfledger.schema.partition_input import (
    KIND,
    EngineSteps,
    Members,
    OwnSpans,
    once_per_step,
)
from perfledger.schema.span_ids import SpanIds, SpanIndex
from perfledger.schema.step_members import find_members

ROOT_COLUMNS: tuple[str, ...] = (
    *("trace_id", "span_id", "parent_span_id", "name", "start_ns", "end_ns", "status"),
    *("run_id", "service_name", "operation", "model", "input_tokens", "cached_tokens"),
    *("output_tokens", "reasoning_tokens", "error_type", "outcome", "tenant", "traffic_class"),
    *("session", "deadline_ms", "ttfc_ns", "boot_id"),
)
STEP_COLUMNS: tuple[str, ...] = (
    *("run_id", "service_name", "replica", "rank", "trace_id", "span_id", "kind", "start_ns"),
    *("schedule_end_ns", "sample_start_ns", "sample_end_ns", "end_ns", "prefill_tokens"),
)
_IDS = ["trace_id", "span_id"]
_ENGINE = ("service_name", "run_id", "replica", "trace_id")
_DEEPEST = 64  # spans between a span and its request; a cycle ends there


@dataclass(frozen=True)
class RequestRoots:
    """The server roots of requests, one row each, sorted by trace and span id."""

    rows: pl.DataFrame  # ROOT_COLUMNS
    index: SpanIndex


@dataclass(frozen=True)
class RequestSpans:
    """The requests' own spans, and how many distinct waits in the queue each of them had."""

    spans: OwnSpans
    waits: Ints


@dataclass(frozen=True)
class RequestSteps:
    """The steps of all first ranks, and the requests that were in them."""

    rows: pl.DataFrame  # STEP_COLUMNS
    times: EngineSteps
    members: Members  # sorted, once per step


@dataclass(frozen=True)
class RequestTraces:
    """Requests with their own spans and their steps."""

    roots: pl.DataFrame
    spans: OwnSpans
    waits: Ints
    step_rows: pl.DataFrame
    steps: EngineSteps
    members: Members

    @classmethod
    def of(cls, roots: RequestRoots, own: RequestSpans, steps: RequestSteps) -> "RequestTraces":
        """Put together what was found for the same roots."""
        return cls(roots.rows, own.spans, own.waits, steps.rows, steps.times, steps.members)

    @property
    def sampling(self) -> NDArray[np.bool_]:
        """Which steps have a sample child."""
        return self.step_rows.select(_has_sample()).to_series().to_numpy()


def is_request_root() -> pl.Expr:
    """Return the condition under which a span is the server root of a request."""
    named = pl.col("name").is_in(list(REQUEST_ROOTS))
    known = pl.col("operation").is_not_null() | pl.col("model").is_not_null() | named
    return (pl.col("kind") == "server") & known


def find_roots(spans: pl.LazyFrame, wanted: pl.Expr | None = None) -> RequestRoots:
    """Find the requests among `spans` (columns of SPANS) whose root is `wanted`, or all.

    Of two roots with one id the one that ends last counts.
    """
    chosen = is_request_root() if wanted is None else is_request_root() & wanted
    roots = _newest(spans.filter(chosen).select(ROOT_COLUMNS).collect()).sort(_IDS)
    return RequestRoots(roots, SpanIndex(SpanIds.of(roots["trace_id"], roots["span_id"])))


def find_steps(
    roots: RequestRoots, steps: pl.DataFrame, members: Iterable[pa.Array]
) -> RequestSteps:
    """Find the steps of the requests.

    `steps` has STEP_COLUMNS, and `members` the `members` of its rows, in one array or several.
    """
    row, steps = _first_rank(steps)
    times = _engine_steps(steps)
    found = find_members(roots.index, members, row, steps["kind"])
    return RequestSteps(steps, times, once_per_step(found, times))


def _newest(spans: pl.DataFrame) -> pl.DataFrame:
    """Keep one span of each id: the one that ends last."""
    if spans.select(_IDS).n_unique() == len(spans):
        return spans
    order = ["end_ns", "start_ns", *(c for c in ("name", "schedule_end_ns") if c in spans.columns)]
    newest = spans.sort(order, descending=[True, *[False] * (len(order) - 1)])
    return newest.unique(_IDS, keep="first", maintain_order=True)


def find_own_spans(roots: RequestRoots, spans: pl.LazyFrame) -> RequestSpans:
    """Find the spans among `spans` (columns of SPANS) that tell of the requests' stages."""
    named = pl.col("name").is_in([name for name in KIND if name != "held_back"])
    own = (
        spans.filter(named & ~is_request_root().fill_null(False))
        .select(
            *("trace_id", "parent_span_id", "start_ns", "end_ns"),
            kind=pl.col("name").replace_strict(KIND, return_dtype=pl.Int8),
            held=(pl.col("name") == "stream") & (pl.col("reason") == "backpressure"),
        )
        .collect()
    )
    owner = _owners(roots, own, spans)
    mine = np.flatnonzero(owner >= 0)
    held = np.flatnonzero((owner >= 0) & own["held"].fill_null(False).to_numpy())
    rows = np.concatenate([mine, held])
    kind = own["kind"].to_numpy()[rows]
    kind[len(mine) :] = KIND["held_back"]
    start, end = own["start_ns"].to_numpy()[rows], own["end_ns"].to_numpy()[rows]
    found = OwnSpans(owner[rows], kind, start, end)
    return RequestSpans(found, _count_waits(found, len(roots.rows)))


def _count_waits(spans: OwnSpans, requests: int) -> Ints:
    queued = np.flatnonzero(spans.kind == KIND["queue"])
    request, start = spans.request[queued], spans.start_ns[queued]
    order = np.lexsort((start, request))
    request, start = request[order], start[order]
    distinct = np.ones(len(request), np.bool_)
    distinct[1:] = (request[1:] != request[:-1]) | (start[1:] != start[:-1])
    return np.bincount(request[distinct], minlength=requests)


def _owners(roots: RequestRoots, own: pl.DataFrame, spans: pl.LazyFrame) -> Ints:
    """Return the request of each span, -1 where none is above it."""
    owner = roots.index.find(SpanIds.of(own["trace_id"], own["parent_span_id"]))
    lost = own[np.flatnonzero(owner == -1)].select("trace_id", "parent_span_id")
    in_trace = lost["trace_id"].is_in(roots.rows["trace_id"].unique().implode())
    nested = np.flatnonzero((in_trace & lost["parent_span_id"].is_not_null()).to_numpy())
    if len(nested):
        owner[np.flatnonzero(owner == -1)[nested]] = _climb(roots.index, lost[nested], spans)
    return owner


def _climb(index: SpanIndex, nested: pl.DataFrame, spans: pl.LazyFrame) -> Ints:
    """Follow parent after parent to the nearest request; one that is not in the index ends it."""
    traces = nested["trace_id"].unique().implode()
    # Of equal ids with different parents any would do, if it is always the same one.
    above = (
        spans.filter(pl.col("trace_id").is_in(traces))
        .group_by(_IDS)
        .agg(pl.col("parent_span_id").min(), root=is_request_root().fill_null(False).any())
        .collect()
    )
    tree = SpanIndex(SpanIds.of(above["trace_id"], above["span_id"]))
    parents = SpanIds.of(above["trace_id"], above["parent_span_id"])
    owner_above, next_above = index.find(parents), tree.find(parents)
    next_above[above["root"].to_numpy()] = -1
    owner_above[above["root"].to_numpy()] = -1

    at = tree.find(SpanIds.of(nested["trace_id"], nested["parent_span_id"]))
    owner = np.full(len(nested), -1, np.int64)
    for _ in range(_DEEPEST):
        climbing = np.flatnonzero((owner == -1) & (at >= 0))
        owner[climbing] = owner_above[at[climbing]]
        at[climbing] = next_above[at[climbing]]
    return owner


def _first_rank(steps: pl.DataFrame) -> tuple[Ints, pl.DataFrame]:
    """Return each step of rank 0 once, and where each of the given rows is in it (-1: nowhere)."""
    first_rank = (steps["rank"].fill_null(0) == 0).to_numpy()
    kept = _newest(steps if first_rank.all() else steps.filter(pl.Series(first_rank)))
    if len(kept) == len(steps):
        return np.arange(len(steps)), kept
    index = SpanIndex(SpanIds.of(kept["trace_id"], kept["span_id"]))
    row = index.find(SpanIds.of(steps["trace_id"], steps["span_id"]))
    row[~first_rank] = -1
    return row, kept


def _engine_steps(steps: pl.DataFrame) -> EngineSteps:
    """Number the engines; a step without a sample child gets an empty one at its end."""
    engine = steps.select(pl.struct(_ENGINE).rank("dense").cast(pl.Int64) - 1).to_series()
    times = steps.select(
        "start_ns",
        "schedule_end_ns",
        pl.when(_has_sample()).then("sample_start_ns").otherwise("end_ns").alias("sample_start_ns"),
        pl.when(_has_sample()).then("sample_end_ns").otherwise("end_ns").alias("sample_end_ns"),
        "end_ns",
    )
    return EngineSteps(engine.to_numpy(), *(column.to_numpy() for column in times))


def _has_sample() -> pl.Expr:
    return pl.col("sample_start_ns").is_not_null() & pl.col("sample_end_ns").is_not_null()
