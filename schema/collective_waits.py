"""What of a collective is waiting for other ranks, and what is moving data. Pure; used at read.

The ranks of one call enter it at different times, and leave it together. The shortest time over
the ranks bounds the transfer, for the last to come has nobody to wait for; what another rank spent
beyond it was waiting (HolisticTraceAnalysis; NCCL's own tools tell only the sum). It is a bound:
the rank that comes last may itself wait for the network.
"""

import polars as pl

from perfledger.schema.communication import bus_factor

# What names one call over all ranks. Trace ids differ from rank to rank.
_SOURCE = ("run_id", "service_name", "replica")
_CALL = ("group", "members", "sequence")
POINT_TO_POINT = ("send", "recv")


def with_waits(collectives: pl.DataFrame) -> pl.DataFrame:
    """Return rows of `collectives` with `wait_ns` and `transfer_ns`, null where not known.

    Known where the rows of all ranks of a call are there with their ends and agree in what it was;
    point-to-point has two ranks. A row's own time is start, or where that is not observable
    enqueue, to end. An engine that was started again counts from 0 again: its calls are the second
    ones of their number on every rank, and if some rank has fewer, none of them is known. Calls of
    one number that overlap are of different services with one name: nobody knows whose is whose.
    """
    from_here = pl.col("op") == "send"
    rows = collectives.with_columns(
        is_pair=pl.col("op").is_in(POINT_TO_POINT),
        own_ns=pl.col("end_ns") - pl.coalesce("start_ns", "enqueue_ns"),
    ).with_columns(
        what=pl.when("is_pair").then(pl.lit("pair")).otherwise("op"),
        pair_source=pl.when("is_pair").then(pl.when(from_here).then("rank").otherwise("peer")),
        pair_target=pl.when("is_pair").then(pl.when(from_here).then("peer").otherwise("rank")),
        expected=pl.when("is_pair").then(2).otherwise("ranks"),
    )
    named = [*_SOURCE, *_CALL, "is_pair", "pair_source", "pair_target"]
    rows = rows.with_columns(
        time=pl.col("enqueue_ns").rank("ordinal").over([*named, "rank"]),
        times=pl.len().over([*named, "rank"]),
    )
    call = [*named, "time"]
    rows = rows.with_columns(mixed=_mixed(rows, named))
    whole = (
        ~pl.col("mixed").first()
        & (pl.len() == pl.col("expected").first())
        & pl.col("own_ns").is_not_null().all()
        & (pl.col("times").n_unique() == 1)
        & (pl.col("what").n_unique() == 1)
        & (pl.col("dtype").n_unique() == 1)
    ).over(call)
    rows = rows.with_columns(
        transfer_ns=pl.when(whole).then(pl.col("own_ns").min().over(call)),
    ).with_columns(wait_ns=pl.col("own_ns") - pl.col("transfer_ns"))
    return rows.select(*collectives.columns, "wait_ns", "transfer_ns")


def _mixed(rows: pl.DataFrame, named: list[str]) -> pl.Series:
    """Return for each row whether calls of its number overlap: one service has one at a time."""
    spans = rows.with_columns(
        begin=pl.col("enqueue_ns").min().over([*named, "time"]),
        end=pl.coalesce("end_ns", "enqueue_ns").max().over([*named, "time"]),
    )
    calls = spans.select(*named, "time", "begin", "end").unique()
    calls = calls.sort([*named, "time"], nulls_last=True).with_columns(
        before=pl.col("end").shift(1).over(named)
    )
    overlapping = (pl.col("begin") < pl.col("before")).fill_null(False).any().over(named)
    calls = calls.select(*named, "time", mixed=overlapping)
    joined = rows.join(
        calls, on=[*named, "time"], how="left", nulls_equal=True, maintain_order="left"
    )
    return joined["mixed"]


def with_bus_bandwidth(waits: pl.DataFrame) -> pl.DataFrame:
    """Return rows of `with_waits` with `bus_bytes_per_s`, as nccl-tests has it: null where the
    transfer is not known, or the operation has no factor."""
    kinds = waits.select("op", "ranks").unique()
    factors = [_factor(op, ranks) for op, ranks in kinds.iter_rows()]
    kinds = kinds.with_columns(factor=pl.Series(factors, dtype=pl.Float64))
    took_s = pl.when(pl.col("transfer_ns") > 0).then("transfer_ns") / 1e9
    joined = waits.join(
        kinds, on=["op", "ranks"], how="left", nulls_equal=True, maintain_order="left"
    )
    joined = joined.with_columns(bus_bytes_per_s=pl.col("bytes") / took_s * pl.col("factor"))
    return joined.drop("factor")


def of_requests(
    requests: pl.DataFrame, steps: pl.DataFrame, collectives: pl.DataFrame
) -> pl.DataFrame:
    """Return which collectives ran in which request's steps: `request_trace_id`,
    `request_span_id` and the columns of `collectives`, a row for each request and call.

    A request's steps are those that name it as a member (rank 0's, for others schedule nothing);
    the other ranks' part of a step has the same replica and number. A step holds several requests:
    its collectives are those of all of them.
    """
    members = (
        steps.filter(pl.col("members").list.len() > 0)
        .select(*_SOURCE, "step_seq", "start_ns", "end_ns", "members")
        .explode("members")
        .with_columns(
            request_trace_id=pl.col("members").struct.field("trace_id"),
            request_span_id=pl.col("members").struct.field("span_id"),
        )
    )
    theirs = members.join(
        requests.select("trace_id", "span_id"),
        left_on=["request_trace_id", "request_span_id"],
        right_on=["trace_id", "span_id"],
        how="semi",
    ).select(
        *_SOURCE,
        "step_seq",
        "request_trace_id",
        "request_span_id",
        step_start_ns="start_ns",
        step_end_ns="end_ns",
    )
    joined = theirs.join(collectives, on=[*_SOURCE, "step_seq"], how="inner", nulls_equal=True)
    # A restarted engine counts its steps from 1 again: the call must be of the time of the step.
    inside = (pl.col("enqueue_ns") < pl.col("step_end_ns")) & (
        pl.coalesce("end_ns", "enqueue_ns") >= pl.col("step_start_ns")
    )
    return joined.filter(inside).drop("step_start_ns", "step_end_ns")


def _factor(op: str, ranks: int | None) -> float | None:
    if ranks is None or ranks < 1:
        return None
    try:
        return bus_factor(op, ranks)
    except KeyError:
        return None
