"""The store: immutable Parquet files in a folder, and the one reader that knows how to see them.

Layout: `<root>/<namespace>/<table>/<hour of arrival>/<arrival_ns>-<random>.parquet`. A file
appears whole, by write, sync and rename; a name that does not end in `.parquet` is not data.
"""

import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from perfledger.schema.columns import Table
from perfledger.schema.errors import NoDataError, UsageError
from perfledger.schema.tables import REQUESTS, SPANS, TABLES

DEFAULT_STORE = "./perfledger-data"
DEFAULT_NAMESPACE = "default"
_NAMESPACE = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
# Delta packing beats dictionaries on these; the others compress best with one (measured).
_DELTA_COLUMNS = frozenset(
    {"start_ns", "end_ns", "time_ns", "received_ns", "step_seq", "token_times_ns"}
)


class Store:
    """One namespace of one store. Safe to use from several processes: files are never changed."""

    def __init__(self, root: Path, namespace: str = DEFAULT_NAMESPACE) -> None:
        self.root = root
        self.namespace = namespace

    @classmethod
    def at(cls, url: str, namespace: str = DEFAULT_NAMESPACE) -> Self:
        """Return the store at a URL. Today a local folder; raises UsageError for anything else."""
        if not url:
            raise UsageError(
                "the store has no name", fix="give a folder: --store ./perfledger-data"
            )
        if not _NAMESPACE.fullmatch(namespace):
            raise UsageError(f"not a namespace: {namespace!r}", fix="use a-z, 0-9, - and _")
        if "://" in url and not url.startswith("file://"):
            raise UsageError(
                f"cannot open the store {url!r}",
                fix="give a local folder, e.g. --store ./perfledger-data",
            )
        root = Path(url.removeprefix("file://"))
        if root.exists() and not root.is_dir():
            raise UsageError(f"the store {url!r} is not a folder", fix="give a folder")
        return cls(root, namespace)

    def write(self, table: str, rows: pa.Table) -> Path:
        """Write rows as one new file and return its path; durable when this returns."""
        declared = TABLES[table]
        arrived_ns = time.time_ns()
        hour = datetime.fromtimestamp(arrived_ns / 1e9, UTC).strftime("%Y-%m-%dT%H")
        folder = self.root / self.namespace / table / hour
        _make_durably(folder)
        path = folder / f"{arrived_ns}-{secrets.token_hex(4)}.parquet"
        rows = rows.select(declared.names()).cast(declared.arrow())
        rows = rows.sort_by([(name, "ascending") for name in declared.sort])
        _write_durably(path, rows, declared)
        return path

    def prepare(self) -> None:
        """Create the store's folder. Raises UsageError where nothing can be written there."""
        folder = self.root / self.namespace
        try:
            _make_durably(folder)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UsageError(
                f"cannot write to the store: {reason}",
                where=str(folder),
                fix="give a folder that you may write to with --store",
            ) from error

    def files(self, table: str, since_ns: int = 0) -> list[Path]:
        """Return the files of a table written at or after a wall time, oldest first."""
        files = sorted((self.root / self.namespace / table).glob("*/*.parquet"))
        return [path for path in files if not since_ns or written_ns(path) >= since_ns]

    def scan(self, table: str, since_ns: int = 0) -> pl.LazyFrame:
        """Return the rows of `files(table, since_ns)`, duplicates dropped, or no rows."""
        rows = self.scan_as_received(table, since_ns)
        return _newest_version(rows) if table == REQUESTS.name else _once(rows, TABLES[table])

    def scan_as_received(self, table: str, since_ns: int = 0) -> pl.LazyFrame:
        """Return `scan` with re-sent rows and old versions: faster, where these do no harm."""
        files = self.files(table, since_ns)
        return pl.scan_parquet(files, glob=False) if files else empty_frame(TABLES[table])

    def read_as_received(
        self, table: str, columns: Sequence[str], encoded: Sequence[str], since_ns: int = 0
    ) -> Iterator[pa.Table]:
        """Yield columns (or leaves, by Parquet's names) file by file as Arrow tables.

        What is in `encoded` stays as Parquet's dictionaries: cheap where values repeat.
        """
        for path in self.files(table, since_ns):
            with pq.ParquetFile(path, read_dictionary=list(encoded)) as file:
                yield file.read(columns=list(columns))

    def require(self, table: str) -> pl.LazyFrame:
        """Return `scan(table)`; raises NoDataError where the table has no file at all."""
        if not self.files(table):
            where = f"store {self.root}, namespace {self.namespace}"
            raise NoDataError(
                f"no {table} in this store",
                where=where,
                fix="start `perfledger collect` on this store and send it telemetry",
            )
        return self.scan(table)


def written_ns(path: Path) -> int:
    """Return when a file of the store was written (wall ns), from its name."""
    return int(path.name.partition("-")[0])


def empty_frame(table: Table) -> pl.LazyFrame:
    """Return a frame of a table's columns and no rows."""
    frame = pl.from_arrow(table.arrow().empty_table())
    assert isinstance(frame, pl.DataFrame)
    return frame.lazy()


def _once(rows: pl.LazyFrame, table: Table) -> pl.LazyFrame:
    """Drop re-sent rows. Spans with equal ids and different content both stay."""
    keys = list(table.key)
    return rows.unique(subset=keys, keep="first", maintain_order=False)


def _newest_version(rows: pl.LazyFrame) -> pl.LazyFrame:
    """Keep each request's newest row."""
    oldest_first = rows.sort("version", "received_ns")
    return oldest_first.unique(list(REQUESTS.key), keep="last", maintain_order=False)


def id_conflicts(spans: pl.LazyFrame) -> pl.LazyFrame:
    """Return (trace_id, span_id, spans) of ids that several different spans carry."""
    counted = spans.group_by("trace_id", "span_id").agg(pl.len().alias(SPANS.name))
    return counted.filter(pl.col(SPANS.name) > 1)


def _write_durably(path: Path, rows: pa.Table, table: Table) -> None:
    """Write, sync, rename, sync the folder: a crash leaves a whole file or none."""
    leaves = [leaf for field in table.arrow() for leaf in _leaves(field)]
    packed = {leaf for leaf in leaves if not _DELTA_COLUMNS.isdisjoint(leaf.split("."))}
    scratch = path.with_suffix(".writing")
    with open(scratch, "wb") as sink:
        pq.write_table(
            rows,
            sink,
            compression="zstd",
            compression_level=1,
            use_dictionary=[leaf for leaf in leaves if leaf not in packed],
            column_encoding=dict.fromkeys(packed, "DELTA_BINARY_PACKED"),
            row_group_size=65_536,
        )
        sink.flush()
        os.fsync(sink.fileno())
    os.rename(scratch, path)
    _sync_folder(path.parent)


def _make_durably(folder: Path) -> None:
    """Make a folder and those above it, and sync what each new one is an entry of."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _leaves(field: pa.Field) -> Iterator[str]:
    """Yield Parquet's paths of the values in a column; a nested one has several."""
    kind = field.type
    if pa.types.is_list(kind):
        element = kind.value_field.with_name("element")
        yield from (f"{field.name}.list.{leaf}" for leaf in _leaves(element))
    elif pa.types.is_struct(kind):
        yield from (f"{field.name}.{leaf}" for child in kind for leaf in _leaves(child))
    else:
        yield field.name
