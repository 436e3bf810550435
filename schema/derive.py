"""Derived tables: engine steps from step spans, requests from their spans and steps. Pure.

The collector writes these rows; `attribute` makes them again from the spans and compares.
"""

import numpy as np
import polars as pl
import pyarrow as pa

from perfledger.schema.attributes import REQUEST_ROOTS, STEP_NAMES
from perfledger.schema.columns import Table
from perfledger.schema.derived_work import SHAPE_ATTRIBUTE, WORK_ATTRIBUTES, work_columns
from perfledger.schema.intervals import Ints
from perfledger.schema.own_spans import OWN_COLUMNS, find_own_spans
from perfledger.schema.partition import Partition, partition
from perfledger.schema.partition_input import (
    KIND,
)
from perfledger.schema.request_roots import find_roots
from perfledger.schema.request_traces import STEP_COLUMNS, RequestTraces, find_steps
from perfledger.schema.stages import STAGE_COLUMNS, STAGE_NAMES, SUB_STAGE_COLUMNS
from perfledger.schema.tables import REQUESTS, STEPS
from perfledger.schema.token_times import NEVER, TokenTimes, token_times

STATUSES = ("ok", "error", "refused", "aborted")
_STEP_COUNTS = {
    "perfledger.step.width": "width",
    "perfledger.step.prefill_tokens": "prefill_tokens",
    "perfledger.step.decode_tokens": "decode_tokens",
    "perfledger.step.waiting": "waiting",
    "perfledger.step.kv_blocks_used": "kv_blocks_used",
    "perfledger.step.kv_blocks_total": "kv_blocks_total",
    "perfledger.step.cpu_ns": "cpu_ns",
}
_IDS = ("trace_id", "span_id")


def step_rows(spans: pl.DataFrame, received_ns: int) -> pl.DataFrame:
    """Return the `steps` rows of the step spans among `spans` (columns of SPANS).

    The children `schedule` and `sample` give the inner stamps; without a `schedule` child the step
    starts at its span's start. Duplicates give one row. Times are wall ns.
    """
    steps = spans.filter(pl.col("name").is_in(list(STEP_NAMES)))
    steps = steps.sort("end_ns", "start_ns", "name", descending=[True, False, False])
    steps = steps.unique(_IDS, keep="first", maintain_order=True)
    ids = steps.select(_IDS)
    children = spans.select("trace_id", "parent_span_id", "name", "start_ns", "end_ns").join(
        ids, left_on=["trace_id", "parent_span_id"], right_on=_IDS
    )
    rows = steps
    for name in ("schedule", "sample"):
        rows = rows.join(_child(children, name), on=_IDS, how="left", maintain_order="left")
    counts = _counts(steps)
    told = counts.select("prefill_tokens", "decode_tokens", *WORK_ATTRIBUTES.values())
    rows = pl.concat(
        [rows, counts, work_columns(_texts(steps, SHAPE_ATTRIBUTE), told)], how="horizontal"
    )
    rows = rows.with_columns(
        *_nothing_decoded(),
        start_ns=pl.coalesce("schedule_start_ns", "start_ns"),
        schedule_end_ns=pl.coalesce("schedule_end_ns", "start_ns"),
        kind=pl.col("name"),
        replica=pl.coalesce("replica", "service_instance_id", "service_name", pl.lit("")),
        rank=pl.col("rank").fill_null(0),
        step_seq=pl.col("step_seq").fill_null(0),
        members=pl.col("links").list.eval(
            pl.struct(pl.element().struct.field("trace_id", "span_id", "phase", "tokens"))
        ),
        received_ns=pl.lit(received_ns),
    )
    return as_declared(rows, STEPS)


def _child(children: pl.DataFrame, name: str) -> pl.DataFrame:
    """Return the stamps of one child of each step, as `NAME_start_ns` and `NAME_end_ns`."""
    named = children.filter(pl.col("name") == name)
    return named.group_by("trace_id", pl.col("parent_span_id").alias("span_id")).agg(
        pl.col("start_ns").min().alias(f"{name}_start_ns"),
        pl.col("end_ns").max().alias(f"{name}_end_ns"),
    )


def _counts(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the counts that steps carry as attributes, in their order.

    One column each, null where not told; of a key that is there twice the first counts.
    """
    keys = {**_STEP_COUNTS, **WORK_ATTRIBUTES}
    pairs = _pairs(steps, list(keys)).filter(pl.col("int").is_not_null()).reverse()
    number = {key: at for at, key in enumerate(keys)}
    column = pairs["key"].replace_strict(number, return_dtype=pl.Int64).to_numpy()
    at = column, pairs["row"].to_numpy()
    values = np.zeros((len(keys), len(steps)), np.int64)
    told = np.zeros_like(values, np.bool_)
    values[at], told[at] = pairs["int"].to_numpy(), True
    return pl.DataFrame(
        {name: _known(values[at], told[at]) for at, name in enumerate(keys.values())}
    )


def _texts(steps: pl.DataFrame, key: str) -> pl.Series:
    """Return a text that steps carry as an attribute, in their order; null where not told."""
    pairs = _pairs(steps, [key]).unique("row", keep="first")
    rows = steps.select("span_id").with_row_index("row").join(pairs, on="row", how="left")
    return rows.sort("row")["text"]


def _pairs(steps: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """Return the attributes of these keys, one a row, with the row of their step."""
    pairs = steps.select("attributes").with_row_index("row").explode("attributes")
    return pairs.unnest("attributes").filter(pl.col("key").is_in(keys))


def _nothing_decoded() -> list[pl.Expr]:
    """Return 0 for what the decodes of a step read, where there are none."""
    none = pl.when(pl.col("decode_tokens") == 0).then(0)
    return [
        pl.coalesce(name, none).alias(name)
        for name in ("decode_context_tokens", "decode_gathered_blocks")
    ]


def request_rows(
    spans: pl.DataFrame, steps: pl.DataFrame, *, received_ns: int, version: int = 1
) -> pl.DataFrame:
    """Return the `requests` rows of the server roots among `spans` (columns of SPANS).

    `steps` (columns of STEPS) holds all steps of rank 0 that ran meanwhile, also those without a
    member of these requests: they explain its host gaps. Times are wall ns.
    """
    members = [steps["members"].rechunk().to_arrow()]
    roots = find_roots(spans.lazy())
    own = find_own_spans(roots, [spans.select(OWN_COLUMNS).to_arrow()], spans.lazy())
    found = find_steps(roots, steps.select(STEP_COLUMNS), members)
    traces = RequestTraces.of(roots, own, found)
    times = times_of(traces)
    return rows_of(traces, times, split_of(traces, times), received_ns=received_ns, version=version)


def times_of(traces: RequestTraces) -> TokenTimes:
    """Return when the requests' tokens were sampled."""
    own_sample = np.full(len(traces.roots), NEVER)
    sample = traces.spans.kind == KIND["sample"]
    np.minimum.at(own_sample, traces.spans.request[sample], traces.spans.end_ns[sample])
    told = traces.roots["output_tokens"].fill_null(-1).to_numpy()
    return token_times(own_sample, told, traces.steps, traces.sampling, traces.members)


def split_of(traces: RequestTraces, times: TokenTimes) -> Partition:
    """Return the partition of the requests' time, and of their time until the first sample."""
    arrival, end = traces.roots["start_ns"].to_numpy(), traces.roots["end_ns"].to_numpy()
    until = times.first_ns
    return partition(arrival, end, traces.spans, traces.steps, traces.members, until_ns=until)


def rows_of(
    traces: RequestTraces,
    times: TokenTimes,
    split: Partition,
    *,
    received_ns: int,
    version: int = 1,
) -> pl.DataFrame:
    """Return the `requests` rows of gathered traces, in their order."""
    roots = traces.roots
    arrival = roots["start_ns"].to_numpy()
    end = np.maximum(arrival, roots["end_ns"].to_numpy())
    first = np.clip(times.first_ns, arrival, end) - arrival
    steps = np.bincount(traces.members.request, minlength=len(roots))
    longest = pl.Series(STAGE_NAMES).gather(split.stages.argmax(axis=1))
    rows = roots.with_columns(
        *_named(STAGE_COLUMNS, split.stages),
        *_named(SUB_STAGE_COLUMNS, split.sub_stages),
        arrival_ns=arrival,
        end_ns=end,
        e2e_ns=end - arrival,
        ttft_ns=_known(first, times.first_ns < NEVER),
        steps=_known(steps, steps > 0),
        preemptions=_known(traces.waits - 1, traces.waits > 0),
        longest=longest,
        replica=pl.coalesce("replica", _first_replica(traces)),
        token_times_ns=_token_lists(len(roots), times),
        operation=pl.coalesce(
            "operation", pl.when(pl.col("name").is_in(list(REQUEST_ROOTS))).then("name")
        ),
        status=_status(),
        version=pl.lit(version),
        received_ns=pl.lit(received_ns),
    )
    return as_declared(rows, REQUESTS)


def _status() -> pl.Expr:
    told = pl.when(pl.col("outcome").is_in(STATUSES)).then("outcome")
    failed = pl.when(pl.col("status") == "error").then(pl.lit("error")).otherwise(pl.lit("ok"))
    return pl.coalesce(told, failed)


def _first_replica(traces: RequestTraces) -> pl.Series:
    first = np.full(len(traces.roots), -1, np.int64)
    first[traces.members.request[::-1]] = traces.members.step[::-1]  # the last to be set stays
    rows = pl.Series(first)
    return traces.step_rows["replica"].gather(rows.set(rows < 0, None))


def _token_lists(requests: int, times: TokenTimes) -> pl.Series:
    """Return one list of token times a request; null where nothing tells of any token."""
    counts = np.bincount(times.request, minlength=requests)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    null = np.append(counts == 0, False)
    lists = pa.LargeListArray.from_arrays(pa.array(offsets, mask=null), pa.array(times.time_ns))
    return pl.DataFrame(pa.table({"times": lists}))["times"]


def _known(values: Ints, known: np.ndarray) -> pl.Series:
    series = pl.Series(values)
    return series.set(pl.Series(~known), None)


def _named(names: tuple[str, ...], columns: Ints) -> list[pl.Series]:
    return [pl.Series(name, columns[:, at]) for at, name in enumerate(names)]


def as_declared(rows: pl.DataFrame, table: Table) -> pl.DataFrame:
    """Select and cast to the declared columns.

    Values come from outside: one that its column cannot hold is not known, and must stop nothing.
    """
    empty = pl.DataFrame(table.arrow().empty_table())
    return rows.select(pl.col(name).cast(kind, strict=False) for name, kind in empty.schema.items())
