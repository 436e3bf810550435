"""Telemetry that never arrived: what services say, in their metrics, that they lost on the way."""

import polars as pl

from perfledger.analyzers.ledger import Selection
from perfledger.schema import metrics

# Losses to a full ring are in the trace itself, as `telemetry_dropped` spans.
ON_THE_WAY = ("socket", "export")


def lost_on_the_way(selection: Selection, first_ns: int, last_ns: int) -> int:
    """Return items lost between two wall times, of the selected run or service.

    The counter is cumulative per process and place: its growth from the last point before
    `first_ns` (0 for a process that started later) to the first point from `last_ns` on (else the
    newest). A loss that was told late, after an outage, counts in the window in which it was told.
    """
    told = (
        selection.store.scan("points", selection.since_ns)
        .filter((pl.col("name") == metrics.TELEMETRY_LOST.name) & selection.of_resource())
        .select("time_ns", "value", "service_instance_id", where=_where())
        .filter(pl.col("where").is_in(ON_THE_WAY))
        .sort("time_ns")
    )
    before = pl.col("value").filter(pl.col("time_ns") < first_ns).last().fill_null(0)
    after = pl.col("value").filter(pl.col("time_ns") >= last_ns).first()
    growth = pl.coalesce(after, pl.col("value").last()) - before
    grown = told.group_by("service_instance_id", "where").agg(growth.alias("lost")).collect()
    return int(grown["lost"].clip(lower_bound=0).sum())


def _where() -> pl.Expr:
    named = pl.element().struct.field("key") == metrics.TELEMETRY_LOST.attribute
    values = pl.element().struct.field("text").filter(named)
    return pl.col("attributes").list.eval(values).list.first()
