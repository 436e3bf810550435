"""Who was in which step: the member lists of steps, joined to requests.

A request is in many steps, so its ids are looked up once for each file, not once for each step:
this is why everything here works on dictionaries, as Parquet stores them.
"""

from collections.abc import Iterable

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from perfledger.schema.encoded_columns import codes, encoded, numbered
from perfledger.schema.intervals import Ints
from perfledger.schema.partition_input import (
    DECODE,
    PREFILL,
    RECOMPUTE,
    Members,
    Small,
)
from perfledger.schema.span_ids import SpanIds, SpanIndex

# Leaves of `steps` that are read, as Parquet names them; a reader should keep them encoded.
MEMBER_LEAVES: tuple[str, ...] = tuple(
    f"members.list.element.{name}" for name in ("trace_id", "span_id", "phase")
)
_PHASES = {"recompute": RECOMPUTE, "prefill": PREFILL}
_UNTOLD = 0
_NO_MEMBERS = Members(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int8))


def find_members(
    index: SpanIndex, members: Iterable[pa.Array], row: Ints, kind: pl.Series
) -> Members:
    """Return the members that are requests of `index`.

    `members` holds the lists of steps, in one array or several; `row` the number that each of
    these steps goes by (-1: left out), `kind` the kinds of steps by that number.
    """
    prefills = np.append((kind == "prefill_step").to_numpy(), False)  # for -1
    parts, first = [_NO_MEMBERS], 0
    for lists in members:
        offset = lists.offsets.to_numpy()
        step = np.repeat(row[first : first + len(lists)], np.diff(offset))
        first += len(lists)
        values = lists.values[offset[0] : offset[-1]]
        found = find_requests(index, values.field("trace_id"), values.field("span_id"))
        known = np.flatnonzero((found >= 0) & (step >= 0))
        phase = phases_of(values.field("phase"), prefills, step)
        parts.append(Members(found[known], step[known], phase[known]))
    return Members(
        np.concatenate([part.request for part in parts]),
        np.concatenate([part.step for part in parts]),
        np.concatenate([part.phase for part in parts]),
    )


def find_requests(index: SpanIndex, trace_id: pa.Array, span_id: pa.Array) -> Ints:
    """Return the row in `index` of each id, or -1. Looks up each different id once."""
    trace_id, span_id = encoded(trace_id), encoded(span_id)
    traces, spans = len(trace_id.dictionary), len(span_id.dictionary)
    trace_code, span_code = codes(trace_id, null=traces), codes(span_id, null=spans)
    trace_of, span_of = np.full(spans + 1, traces), np.arange(spans + 1)
    trace_of[span_code] = trace_code
    if (trace_of[span_code] != trace_code).any():  # one span id in several traces
        pairs, span_code = np.unique(trace_code * (spans + 1) + span_code, return_inverse=True)
        trace_of, span_of = np.divmod(pairs, spans + 1)
    ids = SpanIds.of_pairs(trace_id.dictionary, trace_of, span_id.dictionary, span_of)
    return index.find(ids)[span_code]


def phases_of(phase: pa.Array, prefills: NDArray[np.bool_], step: Ints) -> Small:
    """Number the phases; where a link does not tell, the kind of the step does."""
    number = numbered(phase, _PHASES, other=DECODE, null=_UNTOLD)
    untold = np.flatnonzero(number == _UNTOLD)
    number[untold] = np.where(prefills[step[untold]], PREFILL, DECODE)
    return number
