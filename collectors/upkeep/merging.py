"""Files of one table as one: sorted, and without what was sent again."""

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from perfledger.schema.columns import Table
from perfledger.schema.errors import PartialInputError
from perfledger.schema.store_files import as_declared, is_whole, sort_order
from perfledger.schema.store_places import Place
from perfledger.schema.store_pruning import without_empty
from perfledger.schema.store_snapshot import StoredFile

# Rows that are put in order at a time; a multiple of the row group.
_BATCH_ROWS = 131_072
RECEIVED = "received_ns"


def read_file(place: Place, file: StoredFile, table: Table) -> pa.Table:
    """Return the rows of a file in declared columns.

    Raises PartialInputError or what pyarrow raises of a damaged file or one of another version,
    and FileNotFoundError.
    """
    content = place.read(file.key)
    if not is_whole(content):
        raise PartialInputError("its checksum differs", where=place.address(file.key))
    with pq.ParquetFile(pa.BufferReader(content)) as parquet:
        return as_declared(parquet.read(use_threads=False), table)


def merge(parts: Sequence[pa.Table], table: Table) -> tuple[int, Iterator[pa.Table]]:
    """Return how many rows are left, and these in sorted batches.

    Rows that differ in their arrival only are one row, the first; rows with equal keys that
    differ in anything else all stay.
    """
    rows = pa.concat_tables(parts).combine_chunks()
    order = sort_order(rows, table).to_numpy()
    again = sent_again(rows, table)
    if len(again):
        order = order[~np.isin(order, again)]
    rows = without_empty(rows, table)
    batches = (
        rows.take(pa.array(order[at : at + _BATCH_ROWS]))
        for at in range(0, len(order), _BATCH_ROWS)
    )
    return len(order), batches


def sent_again(rows: pa.Table, table: Table) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the numbers of the rows that repeat another in all but the arrival."""
    keys = pl.DataFrame(rows.select(list(table.key)))
    suspects = np.flatnonzero(keys.is_duplicated().to_numpy())
    if not len(suspects):
        return suspects
    found = pl.DataFrame(rows.take(pa.array(suspects))).with_columns(at=pl.Series(suspects))
    whole = [name for name in rows.column_names if name != RECEIVED]
    first = found.sort(RECEIVED, "at").unique(whole, keep="first")
    return np.setdiff1d(suspects, first["at"].to_numpy())
