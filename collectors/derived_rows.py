"""Rows derived from a batch of spans, however many of them cannot be derived from."""

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl
import pyarrow as pa

from perfledger.schema.columns import Table

_IDS = ["trace_id", "span_id"]
_MOST_DEFECTS = 16  # of one batch, before the rest of it is given up


@dataclass(frozen=True)
class Derived:
    """Rows, and how many could not be made, with some of the errors."""

    rows: pl.DataFrame
    failed: int = 0
    defects: tuple[Exception, ...] = ()


def derive_what_can_be(
    batch: pl.DataFrame, table: Table, derive: Callable[[pl.DataFrame], pl.DataFrame]
) -> Derived:
    """Derive a batch; where that raises, its halves, so that one that cannot be goes alone."""
    defects: list[Exception] = []
    parts, failed, todo = [empty_rows(table)], 0, [batch]
    while todo:
        some = todo.pop()
        if some.is_empty():
            continue
        try:
            rows = derive(some)
            as_table(rows, table)
        # What is wrong here is ours, not the sender's; the caller tells of it.
        except Exception as defect:
            if len(some) == 1 or len(defects) >= _MOST_DEFECTS:
                defects.append(defect)
                failed += len(some)
            else:
                middle = len(some) // 2
                todo += [some[middle:], some[:middle]]
        else:
            parts.append(rows)
    rows = pl.concat(parts).unique(_IDS, keep="first", maintain_order=True)
    return Derived(rows, failed, tuple(defects))


def empty_rows(table: Table) -> pl.DataFrame:
    """Return no rows, with the columns of a table."""
    return pl.DataFrame(table.arrow().empty_table())


def as_table(rows: pl.DataFrame, table: Table) -> pa.Table:
    """Return rows as the table declares them."""
    if rows.is_empty():
        return table.arrow().empty_table()
    return rows.select(table.names()).to_arrow().cast(table.arrow())
