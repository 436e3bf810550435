"""How far cumulative counters grew over a window, and what gauges last said: from `points`."""

from collections.abc import Sequence

import polars as pl

from perfledger.analyzers.ledger import Selection

# A counter is read every second or so; what is older or younger tells of another time.
NEAR_NS = 60 * 1_000_000_000
_BOOT_ID = r'"perfledger\.clock\.boot_id":"([^"]+)"'


def hosts_of(selection: Selection, from_ns: int, to_ns: int) -> list[str]:
    """Return the boot ids of the hosts that the selected services ran on; empty if not told."""
    spans = selection.spans().filter(selection.of_resource())
    spans = spans.filter((pl.col("start_ns") <= to_ns) & (pl.col("end_ns") >= from_ns))
    return (
        spans.select("boot_id").drop_nulls().unique().sort("boot_id").collect()["boot_id"].to_list()
    )


def points_of(
    selection: Selection, names: Sequence[str], keys: Sequence[str], window: tuple[int, int]
) -> pl.DataFrame:
    """Return points near a window (wall ns): `name`, `time_ns`, `start_ns`, `value`, `instance`,
    `service_name`, `run_id`, `boot_id` and a text column for each attribute key.

    Points that were sent again are there again: they change neither growth nor the newest value.
    """
    from_ns, to_ns = window
    near = pl.col("time_ns").is_between(from_ns - NEAR_NS, to_ns + NEAR_NS)
    return (
        selection.store.scan_as_received("points", selection.since_ns)
        .filter(pl.col("name").is_in(list(names)) & near)
        .select(
            "name",
            "time_ns",
            "start_ns",
            "value",
            "run_id",
            "service_name",
            instance=pl.col("service_instance_id").fill_null(""),
            boot_id=pl.col("resource_attributes").str.extract(_BOOT_ID),
            **{key: attribute(key) for key in keys},
        )
        .collect()
    )


def attribute(key: str) -> pl.Expr:
    """Return an attribute of a point as text, null where it has none."""
    named = pl.element().struct.field("key") == key
    told = pl.coalesce(
        pl.element().struct.field("text"), pl.element().struct.field("int").cast(pl.String)
    )
    return pl.col("attributes").list.eval(told.filter(named)).list.first()


def growth(points: pl.DataFrame, series: Sequence[str], window: tuple[int, int]) -> pl.DataFrame:
    """Return how far each counter among `points` grew: the columns `series` (which tell one counter
    from another), `growth`, `from_ns` and `to_ns`.

    From the last point at or before the window (else the first in it) to the first at or after its
    end (else the last). A counter that fell was started again, and what it shows has grown since
    (as Prometheus' increase() has it); over a new start time nothing is subtracted. One point tells
    of no growth: it gives no row.
    """
    from_ns, to_ns = window
    ordered = points.drop_nulls("value").sort(*series, "time_ns", nulls_last=True)
    before = pl.col("time_ns").filter(pl.col("time_ns") <= from_ns).max()
    after = pl.col("time_ns").filter(pl.col("time_ns") >= to_ns).min()
    within = ordered.with_columns(
        first=before.over(series).fill_null(from_ns), last=after.over(series).fill_null(to_ns)
    ).filter(pl.col("time_ns").is_between(pl.col("first"), pl.col("last")))
    step = pl.col("value").diff().over(series)
    started = (pl.col("start_ns") != pl.col("start_ns").shift()).over(series).fill_null(False)
    grown = pl.when(started).then(0.0).when(step < 0).then("value").otherwise(step)
    steps = within.with_columns(step=grown)
    return (
        steps.group_by(series, maintain_order=True)
        .agg(
            growth=pl.col("step").sum(),
            from_ns=pl.col("time_ns").min(),
            to_ns=pl.col("time_ns").max(),
            points=pl.len(),
        )
        .filter((pl.col("points") > 1) & (pl.col("to_ns") > pl.col("from_ns")))
        .drop("points")
    )


def last_values(points: pl.DataFrame, series: Sequence[str]) -> pl.DataFrame:
    """Return the newest `value` of each gauge among `points`, by the columns `series`."""
    ordered = points.drop_nulls("value").sort("time_ns")
    return ordered.group_by(series, maintain_order=True).agg(pl.col("value").last())
