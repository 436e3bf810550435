"""Transfers that were seen one by one, as rows: collectives, copies, checkpoints, and their edge.

A row is one rank's part of a transfer. Bytes go forward from the edge's source to its target, and
backward; a collective's are those that the rank sent, as each byte received was sent by another.
"""

from collections.abc import Mapping

import polars as pl

from perfledger.analyzers.ledger import Selection
from perfledger.analyzers.step_sums import of_engine
from perfledger.schema.collective_waits import with_bus_bandwidth, with_waits

TRAFFIC = pl.Schema(
    {
        "edge": pl.String,
        "part": pl.String,  # what share of the edge's bytes it belongs to
        "kind": pl.String,  # collective or copy
        "owner": pl.String,  # who did it, in words
        "rank": pl.String,  # as Rank is written
        "called_ns": pl.Int64,  # wall; when its rank called it
        "service": pl.String,
        "selected": pl.Boolean,
        "forward_bytes": pl.Int64,  # null where not known
        "backward_bytes": pl.Int64,
        "start_ns": pl.Int64,  # wall; of a collective whose waiting is known, of the transfer
        "end_ns": pl.Int64,
        "op": pl.String,
        "message_bytes": pl.Int64,
        "ranks": pl.Int64,
        "bus_bytes_per_s": pl.Float64,
    }
)
# Beyond so many rows, waiting is not told from transfer: that would take minutes.
MOST_MATCHED = 2_000_000
# Copies that cross an edge, and whether forward: from the host to the device. Those within one
# memory (`dtype`, `stage`, and swapping where the device is the CPU) are in the work of the step.
_COPIES = {
    "host_to_device": True,
    "device_to_host": False,
    "offload_in": True,
    "offload_out": False,
}
_CHECKPOINTS = {"checkpoint_load": True, "checkpoint_save": False}
_SOURCE = ("run_id", "service_name", "replica")
_RANK = (*_SOURCE, "rank")


def collective_traffic(selection: Selection) -> pl.DataFrame:
    """Return collectives as rows of TRAFFIC: those selected, and others of the same time.

    A group with ranks on several hosts (boot ids) goes over the network, any other scale-up; a
    call whose waiting is known counts from where its transfer began.
    """
    store = selection.store
    rows = store.scan("collectives", selection.since_ns)
    chosen, ours = of_engine(selection, "enqueue_ns")
    rows = rows.with_columns(selected=chosen)
    first, last = _bounds(rows, pl.col("enqueue_ns"), pl.coalesce("end_ns", "enqueue_ns"))
    if first is None:
        return TRAFFIC.to_frame()
    meanwhile = (pl.col("enqueue_ns") <= last) & (
        pl.coalesce("end_ns", "enqueue_ns") >= pl.lit(first)
    )
    found = rows.filter(meanwhile & (pl.col("selected") | ~ours)).collect()
    selected = found.drop_in_place("selected")
    if len(found) <= MOST_MATCHED:
        found = with_bus_bandwidth(with_waits(found)).with_columns(selected)
    else:
        nothing = pl.lit(None, pl.Int64)
        found = found.with_columns(selected, transfer_ns=nothing, bus_bytes_per_s=nothing)
    edges = _group_edges(selection)
    found = found.join(
        edges, on=[*_SOURCE, "group"], how="left", nulls_equal=True, maintain_order="left"
    )
    return _as_traffic(found)


def _as_traffic(found: pl.DataFrame) -> pl.DataFrame:
    began = pl.coalesce(pl.col("end_ns") - pl.col("transfer_ns"), "start_ns", "enqueue_ns")
    dimension = pl.coalesce("dimension", "group")
    service = pl.coalesce("service_name", pl.lit("unnamed service"))
    owner = pl.format(
        "{} replica {} group {}", service, pl.col("replica").fill_null("–"), pl.col("group")
    )
    return _rows(
        found.with_columns(
            edge=pl.coalesce("edge", pl.lit("scale_up")),
            part=pl.format("{} {}", dimension, pl.col("op")),
            kind=pl.lit("collective"),
            owner=owner,
            rank=_rank_text(),
            called_ns=pl.col("enqueue_ns"),
            service=service,
            forward_bytes=pl.col("wire_bytes"),
            backward_bytes=pl.lit(None, pl.Int64),
            start_ns=began,
            end_ns=pl.coalesce("end_ns", began),
            message_bytes=pl.col("bytes"),
        )
    )


def _group_edges(selection: Selection) -> pl.DataFrame:
    """Return which edge each group's ranks talk over, by the hosts of the ranks that were seen."""
    calls = selection.spans().filter(pl.col("name") == "collective")
    # Named as the rows of `collectives` are (derive_collectives.py).
    replica = pl.coalesce("replica", "service_instance_id", "service_name", pl.lit(""))
    calls = calls.with_columns(replica=replica, rank=pl.col("rank").fill_null(0).cast(pl.Int32))
    hosts = calls.select(*_RANK, "boot_id").drop_nulls("boot_id").unique().collect()
    groups = selection.store.scan_as_received("collectives", selection.since_ns)
    members = groups.select(*_RANK, "group").unique().collect()
    placed = members.join(hosts, on=_RANK, how="left", nulls_equal=True)
    several = pl.col("boot_id").drop_nulls().n_unique() > 1
    edge = pl.when(several).then(pl.lit("network")).otherwise(pl.lit("scale_up"))
    return placed.group_by(*_SOURCE, "group").agg(edge=edge)


def copy_traffic(selection: Selection) -> pl.DataFrame:
    """Return copies and checkpoints as rows of TRAFFIC: the selected ones, and others meanwhile."""
    names = ["copy", *_CHECKPOINTS]
    spans = selection.spans().filter(pl.col("name").is_in(names))
    chosen, ours = of_engine(selection, "start_ns")
    spans = spans.with_columns(selected=chosen)
    first, last = _bounds(spans, pl.col("start_ns"), pl.col("end_ns"))
    if first is None:
        return TRAFFIC.to_frame()
    meanwhile = (pl.col("start_ns") <= last) & (pl.col("end_ns") >= pl.lit(first))
    columns = (*_RANK, "name", "start_ns", "end_ns", "trace_id", "span_id")
    found = (
        spans.filter(meanwhile & (pl.col("selected") | ~ours))
        .select(*columns, "selected", "attributes")
        .collect()
        .unique(["trace_id", "span_id"], maintain_order=True)
    )
    return _rows(_with_copies(found))


def _with_copies(found: pl.DataFrame) -> pl.DataFrame:
    """Add what the spans tell; leave out copies that cross no edge."""
    boundary = _attribute("perfledger.copy.boundary", "text")
    found = found.with_columns(
        boundary=pl.when(pl.col("name") == "copy").then(boundary).otherwise("name"),
        size=pl.coalesce(
            _attribute("perfledger.copy.bytes", "int"),
            _attribute("perfledger.checkpoint.bytes", "int"),
        ),
        source=_attribute("perfledger.copy.source", "text"),
        target=_attribute("perfledger.copy.target", "text"),
    )
    forward = {**_COPIES, **_CHECKPOINTS}
    on_host = pl.all_horizontal(pl.col("source", "target").fill_null("").str.starts_with("cpu"))
    is_file = pl.col("name").is_in(list(_CHECKPOINTS))
    found = found.filter(pl.col("boundary").is_in(list(forward)) & (is_file | ~on_host))
    service = pl.coalesce("service_name", pl.lit("unnamed service"))
    is_forward = pl.col("boundary").replace_strict(forward, return_dtype=pl.Boolean)
    return found.with_columns(
        edge=pl.when(is_file).then(pl.lit("storage_local")).otherwise(pl.lit("host_device")),
        part=pl.col("boundary").replace_strict(_WORDS, return_dtype=pl.String),
        kind=pl.lit("copy"),
        owner=_rank_text(),
        service=service,
        forward_bytes=pl.when(is_forward).then("size").otherwise(0),
        backward_bytes=pl.when(is_forward).then(0).otherwise("size"),
        message_bytes=pl.col("size"),
    )


_WORDS: Mapping[str, str] = {
    "host_to_device": "to device",
    "device_to_host": "to host",
    "offload_in": "KV swapped in",
    "offload_out": "KV swapped out",
    "checkpoint_load": "checkpoint loaded",
    "checkpoint_save": "checkpoint saved",
}


def _rank_text() -> pl.Expr:
    return pl.format(
        "{} replica {} rank {}",
        pl.coalesce("service_name", pl.lit("unnamed service")),
        pl.coalesce("replica", pl.lit("–")),
        pl.col("rank").fill_null(0),
    )


def _attribute(key: str, kind: str) -> pl.Expr:
    named = pl.element().struct.field("key") == key
    values = pl.element().struct.field(kind).filter(named)
    return pl.col("attributes").list.eval(values).list.first()


def _bounds(
    rows: pl.LazyFrame, start: pl.Expr, end: pl.Expr
) -> tuple[int, int] | tuple[None, None]:
    """Return when the selected rows began and ended."""
    bounds = rows.filter("selected").select(first=start.min(), last=end.max()).collect()
    first, last = bounds.row(0)
    return (None, None) if first is None else (int(first), int(last))


def _rows(found: pl.DataFrame) -> pl.DataFrame:
    """Return exactly the columns of TRAFFIC; what the rows do not have is null."""
    missing = [name for name in TRAFFIC if name not in found.columns]
    found = found.with_columns(pl.lit(None).alias(name) for name in missing)
    return found.select(pl.col(name).cast(kind) for name, kind in TRAFFIC.items())
