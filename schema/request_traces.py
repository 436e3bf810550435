"""Requests with what belongs to them: their own spans and the engine steps that they were in."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from perfledger.schema.intervals import Ints
from perfledger.schema.own_spans import RequestSpans
from perfledger.schema.partition_input import (
    EngineSteps,
    Members,
    OwnSpans,
    once_per_step,
)
from perfledger.schema.request_roots import RequestRoots, newest_of_each_id
from perfledger.schema.span_ids import SpanIds, SpanIndex
from perfledger.schema.step_members import find_members

STEP_COLUMNS: tuple[str, ...] = (
    *("run_id", "service_name", "replica", "rank", "trace_id", "span_id", "kind", "start_ns"),
    *("schedule_end_ns", "sample_start_ns", "sample_end_ns", "end_ns", "prefill_tokens"),
)
_ENGINE = ("service_name", "run_id", "replica", "trace_id")


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


def _first_rank(steps: pl.DataFrame) -> tuple[Ints, pl.DataFrame]:
    """Return each step of rank 0 once, and where each of the given rows is in it (-1: nowhere)."""
    first_rank = (steps["rank"].fill_null(0) == 0).to_numpy()
    kept = newest_of_each_id(steps if first_rank.all() else steps.filter(pl.Series(first_rank)))
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
