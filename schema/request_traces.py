"""Requests with what belongs to them: their own spans, found through parents, and their steps.

A request is a server span of an LLM operation, keyed by (trace id, span id): one trace may hold
many. A span belongs to the nearest request above it. Everything becomes columns of integers.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl
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
    *("schedule_end_ns", "sample_start_ns", "sample_end_ns", "end_ns", "members"),
)
OWN_NAMES: tuple[str, ...] = tuple(name for name in KIND if name != "held_back")

_DEEPEST = 64  # spans between a span and its request; a cycle ends there
_STEPS_AT_ONCE = 32_768  # bounds the memory for ids of members
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
    roots: pl.DataFrame, own: pl.DataFrame, parents: pl.LazyFrame, steps: pl.DataFrame
) -> RequestTraces:
    """Join spans and steps to their requests.

    `roots` holds spans that satisfy `is_request_root` (ROOT_COLUMNS), `own` those that satisfy
    `is_own_span` (OWN_COLUMNS), of any trace; `parents` is asked for (trace_id, span_id,
    parent_span_id) only where a span is nested deeper than one level; `steps` has STEP_COLUMNS.
    Duplicates are harmless. Of two roots with one id the one that ends last counts.
    """
    newest = roots.sort("end_ns", "start_ns", "name", descending=[True, False, False])
    roots = newest.unique(["trace_id", "span_id"], keep="first", maintain_order=True)
    roots = roots.sort("trace_id", "span_id")
    index = SpanIndex(SpanIds.of(roots["trace_id"], roots["span_id"]))
    owner = _owners(index, roots, own, parents)
    spans, waits = _own_spans(len(roots), own, owner)
    steps = _first_rank(steps)
    engine_steps = _engine_steps(steps)
    return RequestTraces(
        roots,
        spans,
        engine_steps,
        (steps["sample_start_ns"].is_not_null() & steps["sample_end_ns"].is_not_null()).to_numpy(),
        steps["replica"],
        once_per_step(_members(index, steps), engine_steps),
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


def _first_rank(steps: pl.DataFrame) -> pl.DataFrame:
    """Keep each step of rank 0 once."""
    steps = steps.filter(pl.col("rank").fill_null(0) == 0)
    if steps.select("trace_id", "span_id").n_unique() == len(steps):
        return steps  # spares a copy of all members
    newest = steps.sort("end_ns", "start_ns", "schedule_end_ns", descending=[True, False, False])
    return newest.unique(["trace_id", "span_id"], keep="first")


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


def _members(index: SpanIndex, steps: pl.DataFrame) -> Members:
    """Return who was in which step; members of unknown requests are left out."""
    request, step, phase = [], [], []
    for first, part in enumerate(steps.iter_slices(_STEPS_AT_ONCE)):
        sizes = part["members"].list.len().fill_null(0).to_numpy()
        rows = np.repeat(np.arange(len(part)), sizes)
        members = part["members"].filter(pl.Series(sizes > 0)).explode().struct.unnest()
        found = index.find(SpanIds.of(members["trace_id"], members["span_id"]))
        known = np.flatnonzero(found >= 0)
        request.append(found[known])
        step.append(rows[known] + first * _STEPS_AT_ONCE)
        prefills = (part["kind"] == "prefill_step").to_numpy()[rows]
        phase.append(_phases(members["phase"], prefills)[known])
    empty = np.empty(0, np.int64)
    return Members(
        np.concatenate([empty, *request]),
        np.concatenate([empty, *step]),
        np.concatenate([empty.astype(np.int8), *phase]),
    )


def _phases(phase: pl.Series, in_prefill_step: NDArray[np.bool_]) -> NDArray[np.int8]:
    """Number the phases; where a link does not tell, the kind of the step does."""
    prefill = (phase == "prefill").fill_null(False).to_numpy()
    prefill |= phase.is_null().to_numpy() & in_prefill_step
    recompute = (phase == "recompute").fill_null(False).to_numpy()
    return np.where(recompute, RECOMPUTE, np.where(prefill, PREFILL, DECODE)).astype(np.int8)
