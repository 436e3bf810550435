"""Requests with what belongs to them: their own spans, found through parents, and their steps.

A request is a server span of an LLM operation, keyed by (trace id, span id): one trace may hold
many. A span belongs to the nearest request above it. Everything becomes columns of integers.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from perfledger.schema.attributes import REQUEST_ROOTS
from perfledger.schema.intervals import Ints
from perfledger.schema.partition import (
    DECODE,
    KIND,
    PREFILL,
    RECOMPUTE,
    EngineSteps,
    Members,
    OwnSpans,
    once_per_step,
)
from perfledger.schema.span_ids import SpanIds, SpanIndex

ROOT_COLUMNS: tuple[str, ...] = (
    *("trace_id", "span_id", "parent_span_id", "name", "kind", "start_ns", "end_ns", "status"),
    *("run_id", "service_name", "operation", "model", "input_tokens", "cached_tokens"),
    *("output_tokens", "reasoning_tokens", "error_type", "outcome", "tenant", "traffic_class"),
    *("session", "deadline_ms", "ttfc_ns"),
)
OWN_COLUMNS: tuple[str, ...] = (
    *("trace_id", "span_id", "parent_span_id", "name", "kind", "start_ns", "end_ns"),
    *("operation", "model", "reason"),
)
STEP_COLUMNS: tuple[str, ...] = (
    *("run_id", "service_name", "replica", "rank", "trace_id", "span_id", "kind", "start_ns"),
    *("schedule_end_ns", "sample_start_ns", "sample_end_ns", "end_ns"),
)
OWN_NAMES: tuple[str, ...] = tuple(name for name in KIND if name != "held_back")

_IDS = ["trace_id", "span_id"]
_PHASES = {"recompute": RECOMPUTE, "prefill": PREFILL}
_UNTOLD = 0
_NO_MEMBERS = Members(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int8))
_DEEPEST = 64  # spans between a span and its request; a cycle ends there
_ENGINE = ("service_name", "run_id", "replica", "trace_id")


@dataclass(frozen=True)
class RequestTraces:
    """Requests (one row of `roots` each, sorted by trace and span) and what belongs to them."""

    roots: pl.DataFrame
    spans: OwnSpans
    steps: EngineSteps
    sampling: NDArray[np.bool_]  # which steps have a sample child
    replica: pl.Series  # of each step
    members: Members  # sorted, once per step
    waits: Ints  # distinct queue spans of each request


def is_request_root() -> pl.Expr:
    """Return the condition under which a span is the server root of a request."""
    named = pl.col("name").is_in(list(REQUEST_ROOTS))
    known = pl.col("operation").is_not_null() | pl.col("model").is_not_null() | named
    return (pl.col("kind") == "server") & known


def is_own_span() -> pl.Expr:
    """Return the condition under which a span may tell a stage of a request."""
    return pl.col("name").is_in(list(OWN_NAMES)) & ~is_request_root().fill_null(False)


def gather(
    roots: pl.DataFrame,
    own: pl.DataFrame,
    parents: pl.LazyFrame,
    steps: pl.DataFrame,
    members: Iterable[pa.Array],
) -> RequestTraces:
    """Join spans and steps to their requests.

    `roots` holds spans that satisfy `is_request_root` (ROOT_COLUMNS), `own` those that satisfy
    `is_own_span` (OWN_COLUMNS), of any trace; `parents` is asked for (trace_id, span_id,
    parent_span_id) only where a span is nested deeper than one level; `steps` has STEP_COLUMNS
    and `members` the lists of its rows, in one array or several. Duplicates are harmless. Of two
    roots with one id the one that ends last counts.
    """
    newest = roots.sort("end_ns", "start_ns", "name", descending=[True, False, False])
    roots = newest.unique(_IDS, keep="first", maintain_order=True).sort(_IDS)
    index = SpanIndex(SpanIds.of(roots["trace_id"], roots["span_id"]))
    owner = _owners(index, roots, own, parents)
    spans, waits = _own_spans(len(roots), own, owner)
    row, steps = _first_rank(steps)
    engine_steps = _engine_steps(steps)
    return RequestTraces(
        roots,
        spans,
        engine_steps,
        (steps["sample_start_ns"].is_not_null() & steps["sample_end_ns"].is_not_null()).to_numpy(),
        steps["replica"],
        once_per_step(_members(index, members, row, steps), engine_steps),
        waits,
    )


def _owners(
    index: SpanIndex, roots: pl.DataFrame, own: pl.DataFrame, parents: pl.LazyFrame
) -> Ints:
    """Return the request of each span, -1 where none is above it."""
    owner = index.find(SpanIds.of(own["trace_id"], own["parent_span_id"]))
    open_rows = pl.Series(owner == -1) & own["parent_span_id"].is_not_null()
    open_rows &= own["trace_id"].is_in(roots["trace_id"].unique().implode())
    nested = np.flatnonzero(open_rows.to_numpy())
    if len(nested):
        owner[nested] = _climb(index, own[nested], parents)
    return owner


def _climb(index: SpanIndex, nested: pl.DataFrame, parents: pl.LazyFrame) -> Ints:
    """Follow parent after parent to the nearest request."""
    traces = nested["trace_id"].unique().implode()
    tree = parents.filter(pl.col("trace_id").is_in(traces)).select(
        "trace_id", "span_id", "parent_span_id"
    )
    # Equal ids with different parents: any choice would do, as long as it is always the same.
    above = tree.group_by("trace_id", "span_id").agg(pl.col("parent_span_id").min()).collect()
    above_ids = SpanIds.of(above["trace_id"], above["span_id"])
    parent_ids = SpanIds.of(above["trace_id"], above["parent_span_id"])
    above_index = SpanIndex(above_ids)
    owner_above = index.find(parent_ids)
    next_above = above_index.find(parent_ids)

    at = above_index.find(SpanIds.of(nested["trace_id"], nested["parent_span_id"]))
    owner = np.full(len(nested), -1, np.int64)
    for _ in range(_DEEPEST):
        climbing = np.flatnonzero((owner == -1) & (at >= 0))
        if not len(climbing):
            break
        owner[climbing] = owner_above[at[climbing]]
        at[climbing] = next_above[at[climbing]]
    return owner


def _own_spans(requests: int, own: pl.DataFrame, owner: Ints) -> tuple[OwnSpans, Ints]:
    """Return the requests' spans by kind, and how many distinct waits in the queue each had."""
    mine = owner >= 0
    own, owner = own.filter(pl.Series(mine)), owner[mine]
    number = pl.col("name").replace_strict(KIND, return_dtype=pl.Int8)
    kind = own.select(number).to_series().to_numpy()
    start, end = own["start_ns"].to_numpy(), own["end_ns"].to_numpy()
    backpressure = (own["reason"] == "backpressure").fill_null(False).to_numpy()
    held = np.flatnonzero((kind == KIND["stream"]) & backpressure)
    queued = own.select("span_id", "start_ns", "end_ns", request=pl.Series(owner)).filter(
        pl.Series(kind == KIND["queue"])
    )
    waits = np.bincount(queued.unique()["request"].to_numpy(), minlength=requests)
    spans = OwnSpans(
        np.concatenate([owner, owner[held]]),
        np.concatenate([kind, np.full(len(held), KIND["held_back"], np.int8)]),
        np.concatenate([start, start[held]]),
        np.concatenate([end, end[held]]),
    )
    return spans, waits


def _first_rank(steps: pl.DataFrame) -> tuple[Ints, pl.DataFrame]:
    """Return each step of rank 0 once, and where each of the given rows is in it (-1: nowhere)."""
    numbered = steps.with_row_index("given").filter(pl.col("rank").fill_null(0) == 0)
    newest = numbered.sort("end_ns", "start_ns", "schedule_end_ns", descending=[True, False, False])
    kept = newest.unique(_IDS, keep="first", maintain_order=True)
    row = np.full(len(steps), -1, np.int64)
    row[kept["given"].to_numpy()] = np.arange(len(kept))
    if len(kept) < len(numbered):
        index = SpanIndex(SpanIds.of(kept["trace_id"], kept["span_id"]))
        row = index.find(SpanIds.of(steps["trace_id"], steps["span_id"]))
        row[(steps["rank"].fill_null(0) != 0).to_numpy()] = -1
    return row, kept


def _engine_steps(steps: pl.DataFrame) -> EngineSteps:
    """Number the engines; a step without a sample child gets an empty one at its end."""
    engine = steps.select(pl.struct(_ENGINE).rank("dense").cast(pl.Int64) - 1).to_series()
    sampled = pl.col("sample_start_ns").is_not_null() & pl.col("sample_end_ns").is_not_null()
    times = steps.select(
        "start_ns",
        "schedule_end_ns",
        pl.when(sampled).then("sample_start_ns").otherwise("end_ns").alias("sample_start_ns"),
        pl.when(sampled).then("sample_end_ns").otherwise("end_ns").alias("sample_end_ns"),
        "end_ns",
    )
    return EngineSteps(engine.to_numpy(), *(column.to_numpy() for column in times))


def _members(
    index: SpanIndex, members: Iterable[pa.Array], row: Ints, steps: pl.DataFrame
) -> Members:
    """Return who was in which step; members of unknown requests are left out."""
    prefills = np.append((steps["kind"] == "prefill_step").to_numpy(), False)  # row -1: nowhere
    parts, first = [_NO_MEMBERS], 0
    for lists in members:
        step = np.repeat(row[first : first + len(lists)], pc.list_value_length(lists).fill_null(0))
        first += len(lists)
        values = lists.flatten()
        found = _find(index, values.field("trace_id"), values.field("span_id"))
        known = np.flatnonzero((found >= 0) & (step >= 0))
        phase = _phases(values.field("phase"), prefills, step)
        parts.append(Members(found[known], step[known], phase[known]))
    return Members(
        np.concatenate([part.request for part in parts]),
        np.concatenate([part.step for part in parts]),
        np.concatenate([part.phase for part in parts]),
    )


def _find(index: SpanIndex, trace_id: pa.Array, span_id: pa.Array) -> Ints:
    """Look ids up once for each different one: a request is in many steps."""
    trace_code, traces = _encoded(trace_id)
    span_code, spans = _encoded(span_id)
    trace_of = np.zeros(len(spans), np.int64)
    trace_of[span_code] = trace_code
    if (trace_of[span_code] != trace_code).any():  # one span id in several traces
        pairs, span_code = np.unique(trace_code * len(spans) + span_code, return_inverse=True)
        trace_of, span_of = np.divmod(pairs, len(spans))
        spans = spans.gather(span_of)
    return index.find(SpanIds.of(traces.gather(trace_of), spans))[span_code]


def _encoded(values: pa.Array) -> tuple[Ints, pl.Series]:
    """Return a code for each value, and the values by code (one of them null)."""
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    words = pl.Series(values.dictionary, dtype=pl.Binary)
    codes = values.indices.fill_null(len(words)).to_numpy().astype(np.int64)
    return codes, words.append(pl.Series([None], dtype=pl.Binary))


def _phases(phase: pa.Array, prefills: NDArray[np.bool_], step: Ints) -> NDArray[np.int8]:
    """Number the phases; where a link does not tell, the kind of the step does."""
    if not pa.types.is_dictionary(phase.type):
        phase = phase.dictionary_encode()
    numbers = [_PHASES.get(name, DECODE) for name in phase.dictionary.to_pylist()]
    codes = phase.indices.fill_null(len(numbers)).to_numpy()
    number = np.array([*numbers, _UNTOLD], np.int8)[codes]
    untold = number == _UNTOLD
    number[untold] = np.where(prefills[step[untold]], PREFILL, DECODE)
    return number
