"""The `collectives` rows of `collective` spans. Pure.

They say what their span does; replica and rank stand on the step above, or on the span itself.
"""

import polars as pl

from perfledger.schema.attributes import COLLECTIVE_NAME
from perfledger.schema.derive import as_declared
from perfledger.schema.tables import COLLECTIVES

_IDS = ("trace_id", "span_id")
_TEXTS = {
    "perfledger.collective.op": "op",
    "perfledger.collective.group": "group",
    "perfledger.collective.dimension": "dimension",
    "perfledger.collective.members": "members",
    "perfledger.dtype": "dtype",
}
_COUNTS = {
    "perfledger.collective.ranks": "ranks",
    "perfledger.collective.sequence": "sequence",
    "perfledger.collective.peer": "peer",
    "perfledger.collective.bytes": "bytes",
    "perfledger.collective.wire_bytes": "wire_bytes",
    "perfledger.collective.queued_ns": "queued_ns",
}
_FLAGS = {"perfledger.collective.end_observed": "end_observed"}


def is_collective() -> pl.Expr:
    """Return what selects the spans (columns of SPANS) that rows are made of."""
    return pl.col("name") == COLLECTIVE_NAME


def collective_rows(spans: pl.DataFrame, received_ns: int) -> pl.DataFrame:
    """Return the `collectives` rows of the collective spans among `spans` (columns of SPANS).

    A span without op, group or sequence tells too little to match it with other ranks: it makes no
    row. Duplicates give one row. Times are wall ns.
    """
    calls = spans.filter(is_collective())
    calls = calls.sort("end_ns", "start_ns", descending=[True, False])
    calls = calls.unique(_IDS, keep="first", maintain_order=True)
    rows = calls.drop("attributes").join(_told(calls), on=_IDS, how="left")
    rows = rows.filter(pl.all_horizontal(pl.col("op", "group", "sequence").is_not_null()))
    rows = rows.with_columns(
        replica=pl.coalesce("replica", "service_instance_id", "service_name", pl.lit("")),
        rank=pl.col("rank").fill_null(0),
        enqueue_ns=pl.col("start_ns"),
        start_ns=pl.col("start_ns") + pl.col("queued_ns"),
        end_ns=pl.when(pl.col("end_observed").fill_null(True)).then("end_ns"),
        received_ns=pl.lit(received_ns),
    )
    return as_declared(rows, COLLECTIVES)


def _told(calls: pl.DataFrame) -> pl.DataFrame:
    """Return what the calls carry as attributes, one column each, null where not told."""
    pairs = calls.select(*_IDS, "attributes").explode("attributes").unnest("attributes")
    pairs = pairs.filter(pl.col("key").is_in([*_TEXTS, *_COUNTS, *_FLAGS]))
    return pairs.group_by(_IDS).agg(
        pl.col(kind).filter(pl.col("key") == key).first().alias(column)
        for kind, columns in (("text", _TEXTS), ("int", _COUNTS), ("bool", _FLAGS))
        for key, column in columns.items()
    )
