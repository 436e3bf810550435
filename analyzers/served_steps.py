"""The steps that served a selection, with their members, and its requests, as columns."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from perfledger.analyzers.counter_curve import Floats
from perfledger.analyzers.ledger import Selection
from perfledger.analyzers.step_shares import OwnedTime
from perfledger.schema.intervals import Ints
from perfledger.schema.partition_input import DECODE
from perfledger.schema.span_ids import SpanIds, SpanIndex
from perfledger.schema.step_members import MEMBER_LEAVES, find_requests, phases_of
from perfledger.schema.tables import STEPS

_IDS = ["trace_id", "span_id"]
_STEP_COLUMNS = [
    *_IDS,
    *("run_id", "service_name", "replica", "rank", "step_seq", "kind", "start_ns", "end_ns"),
    *("prefill_tokens", "decode_tokens"),
]
_TOKENS_LEAF = "members.list.element.tokens"
_MOST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class StepMembers:
    """Which request computed how many tokens in which step, by row numbers."""

    request: Ints
    step: Ints
    tokens: Ints
    prefill: NDArray[np.bool_]

    @classmethod
    def joined(cls, parts: list[Self]) -> Self:
        """Put them one after another; there is at least one part."""
        columns = zip(*((p.request, p.step, p.tokens, p.prefill) for p in parts), strict=True)
        return cls(*map(np.concatenate, columns))

    def of_steps(self, rows: Ints) -> Self:
        """Return the members of some steps, which go by their place in `rows` then."""
        place = np.full(max(self.step.max(initial=-1), rows.max(initial=-1)) + 1, -1)
        place[rows] = np.arange(len(rows))
        step = place[self.step]
        kept = step >= 0
        return type(self)(self.request[kept], step[kept], self.tokens[kept], self.prefill[kept])


_NONE = np.empty(0, np.int64)
NO_MEMBERS = StepMembers(_NONE, _NONE, _NONE, np.empty(0, np.bool_))


@dataclass(frozen=True)
class Served:
    """Steps of rank 0 and requests of a selection, in `[from_ns, to_ns)`. Times are wall ns.

    `prefill_share` of a step is that of prompt tokens in all its tokens, NaN where it does not
    tell; `member_tokens` is what its members computed, those of other requests too;
    `output_tokens` is -1 where the root does not tell.
    """

    from_ns: int
    to_ns: int
    engine: Ints
    step_seq: Ints
    start_ns: Ints
    end_ns: Ints
    prefill_tokens: Ints
    decode_tokens: Ints
    prefill_share: Floats
    member_tokens: Ints
    members: StepMembers
    arrival_ns: Ints
    left_ns: Ints
    output_tokens: Ints

    def owned(self) -> OwnedTime:
        """Return the time that each step owns."""
        goes_on = self.prefill_share < 1
        return OwnedTime.of(self.engine, self.step_seq, self.start_ns, self.end_ns, goes_on)


def read_served(selection: Selection) -> Served:
    """Return the selected requests, and all steps of their run or service meanwhile."""
    requests = selection.store.collect(
        "requests",
        lambda rows: rows.filter(selection.of_request("arrival_ns")).select(
            *_IDS, "arrival_ns", "end_ns", pl.col("output_tokens").fill_null(-1)
        ),
        since_ns=selection.since_ns,
    )
    index = SpanIndex(SpanIds.of(requests["trace_id"], requests["span_id"]))
    leaves = [*MEMBER_LEAVES, _TOKENS_LEAF] if len(requests) else []
    steps, members = _read_steps(selection, index, leaves)
    from_ns, to_ns = _window(selection, requests, steps)
    meanwhile = (pl.col("start_ns") < to_ns) & (pl.col("end_ns") > from_ns)
    steps = steps.filter(meanwhile).filter(pl.struct(_IDS).is_first_distinct())
    return Served(
        from_ns=from_ns,
        to_ns=to_ns,
        engine=_engines(steps),
        step_seq=steps["step_seq"].to_numpy(),
        start_ns=steps["start_ns"].to_numpy(),
        end_ns=steps["end_ns"].to_numpy(),
        prefill_tokens=steps["prefill_tokens"].fill_null(0).to_numpy(),
        decode_tokens=steps["decode_tokens"].fill_null(0).to_numpy(),
        prefill_share=_prefill_share(steps),
        member_tokens=steps["member_tokens"].to_numpy(),
        members=members.of_steps(steps["row"].to_numpy()),
        arrival_ns=requests["arrival_ns"].to_numpy(),
        left_ns=requests["end_ns"].to_numpy(),
        output_tokens=requests["output_tokens"].to_numpy(),
    )


def _window(selection: Selection, requests: pl.DataFrame, steps: pl.DataFrame) -> tuple[int, int]:
    """Return the selection's range, as far as it is told, else what its requests or steps span."""
    begin, end = requests["arrival_ns"], requests["end_ns"]
    if begin.is_empty():
        begin, end = steps["start_ns"], steps["end_ns"]
    first, last = begin.to_numpy().min(initial=_MOST), end.to_numpy().max(initial=-_MOST)
    from_ns = int(first) if selection.from_ns is None else selection.from_ns
    to_ns = int(last) if selection.to_ns is None else max(int(last), selection.to_ns)
    return from_ns, max(from_ns, to_ns)


def _engines(steps: pl.DataFrame) -> Ints:
    names = pl.struct("service_name", "run_id", "replica", "trace_id")
    return steps.select(names.rank("dense").cast(pl.Int64)).to_series().to_numpy()


def _prefill_share(steps: pl.DataFrame) -> Floats:
    """Return it by the counts of tokens; by the kind where the step counts none; else NaN."""
    prefill, decode = pl.col("prefill_tokens"), pl.col("decode_tokens")
    by_kind = pl.col("kind").replace_strict(
        {"prefill_step": 1.0, "decode_step": 0.0}, default=float("nan"), return_dtype=pl.Float64
    )
    counted = pl.when(prefill + decode > 0).then(prefill / (prefill + decode))
    return steps.select(pl.coalesce(counted, by_kind)).to_series().to_numpy()


def _read_steps(
    selection: Selection, index: SpanIndex, leaves: list[str]
) -> tuple[pl.DataFrame, StepMembers]:
    """Return the steps of rank 0 of the run or service, and who of `index` was in them.

    Read file by file: the members of a store are many, those that count are fewer.
    """
    ours = (pl.col("rank") == 0) & selection.of_resource()
    nothing = STEPS.arrow().empty_table()
    frames: list[pl.DataFrame] = []
    parts: list[StepMembers] = []
    first = 0
    tables = selection.store.read_as_received(
        "steps", [*_STEP_COLUMNS, *leaves], MEMBER_LEAVES, selection.since_ns
    )
    for table in (nothing, *tables):
        frame = pl.DataFrame(table.select(_STEP_COLUMNS))
        tokens, members = _members(table, frame["kind"], index)
        row = np.arange(first, first + len(frame))
        frames.append(frame.with_columns(row=row, member_tokens=tokens).filter(ours))
        parts.append(replace(members, step=members.step + first))
        first += len(frame)
    return pl.concat(frames), StepMembers.joined(parts)


def _members(table: pa.Table, kind: pl.Series, index: SpanIndex) -> tuple[Ints, StepMembers]:
    """Return the tokens of all members of each step, and the members that are in `index`."""
    prefills = (kind == "prefill_step").to_numpy()
    whole, parts, row = np.zeros(len(kind), np.int64), [NO_MEMBERS], 0
    for lists in table["members"].chunks if "members" in table.column_names else ():
        offset = lists.offsets.to_numpy()
        step = np.repeat(np.arange(row, row + len(lists)), np.diff(offset))
        row += len(lists)
        values = lists.values[offset[0] : offset[-1]]
        tokens = pl.Series(values.field("tokens")).fill_null(1).clip(0).to_numpy()
        whole += np.bincount(step, tokens, len(whole)).astype(np.int64)
        found = find_requests(index, values.field("trace_id"), values.field("span_id"))
        prefill = phases_of(values.field("phase"), prefills, step) != DECODE
        here = found >= 0
        parts.append(StepMembers(found[here], step[here], tokens[here], prefill[here]))
    return whole, StepMembers.joined(parts)
