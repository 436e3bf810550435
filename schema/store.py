"""The store: immutable Parquet files in a folder or bucket, and the one reader that sees them.

Layout: `<root>/<namespace>/<table>/<hour>/<ns>-<random>.parquet`. Which of the files count while
others are merged is told in store_snapshot.py; to glob the folder is to see rows twice.
"""

import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Self

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from perfledger.schema.columns import Table
from perfledger.schema.errors import NoDataError, PartialInputError, UsageError
from perfledger.schema.store_damage import explain, missing_file, require_whole
from perfledger.schema.store_files import as_declared, encode, sort_order
from perfledger.schema.store_index import TraceIndex
from perfledger.schema.store_places import LocalPlace, Place, place_at
from perfledger.schema.store_pruning import without_empty
from perfledger.schema.store_snapshot import Snapshot, Snapshots, StoredFile, file_key
from perfledger.schema.tables import REQUESTS, SPANS, TABLES

DEFAULT_STORE = "./perfledger-data"
DEFAULT_NAMESPACE = "default"
_NAMESPACE = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
_RETRIES = 5
# What damaged files make the libraries raise; polars panics, which is no Exception.
_FAILURES = (
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,
    pa.ArrowException,
    ValueError,
    OSError,
)


class Store:
    """One namespace of one store. Safe to use from several processes: files are never changed."""

    def __init__(self, root: Path | Place, namespace: str = DEFAULT_NAMESPACE) -> None:
        self.place: Place = LocalPlace(root) if isinstance(root, Path) else root
        self.namespace = namespace
        self._snapshots = Snapshots(self.place, namespace)
        self._traces = TraceIndex()

    @classmethod
    def at(cls, url: str, namespace: str = DEFAULT_NAMESPACE) -> Self:
        """Return the store at a folder, file:// or s3://bucket/prefix.

        S3 takes endpoint, region and credentials from AWS_* variables. Raises UsageError for
        anything else.
        """
        if not _NAMESPACE.fullmatch(namespace):
            raise UsageError(f"not a namespace: {namespace!r}", fix="use a-z, 0-9, - and _")
        return cls(place_at(url), namespace)

    @property
    def url(self) -> str:
        """Return where the store is, as a user would name it."""
        return self.place.url

    @property
    def root(self) -> Path:
        """Return the folder of a local store; raises UsageError for another."""
        if isinstance(self.place, LocalPlace):
            return self.place.root
        raise UsageError(f"the store {self.url} is no folder", fix="give a folder with --store")

    def write(
        self, table: str, rows: pa.Table, *, name: str | None = None, is_sorted: bool = False
    ) -> Path:
        """Write rows as one new file and return its path; durable when this returns.

        `name` is `<wall ns>-<letters and digits>` and makes the write happen once: where a file of
        that name is, it stays and nothing is written. Raises OSError where the medium fails.
        """
        declared = TABLES[table]
        name = name or f"{time.time_ns()}-{secrets.token_hex(4)}"
        key = file_key(self.namespace, table, f"{name}.parquet")
        if self.place.exists(key):
            self.place.settle(key)
        else:
            rows = as_declared(rows, declared)
            if not is_sorted:
                rows = rows.take(sort_order(rows, declared))
            self.place.create(key, encode([without_empty(rows, declared)], declared))
        return Path(self.place.address(key))

    def prepare(self) -> None:
        """Create the store's folder. Raises UsageError where nothing can be written there."""
        try:
            self.place.prepare(self.namespace)
        except OSError as error:
            raise UsageError(
                f"cannot write to the store: {error.strerror or error}",
                where=f"{self.url}/{self.namespace}",
                fix="give a folder that you may write to with --store",
            ) from error

    def snapshot(self, table: str, since_ns: int = 0) -> Snapshot:
        """Return which files of a table count now, of the hours since a wall time."""
        return self._snapshots.take(table, since_ns)

    def visible(self, table: str, since_ns: int = 0) -> list[StoredFile]:
        """Return the files that count and were written at or after a wall time, oldest first.

        For a merged file that is missing stand those it was made of, as long as they are there.
        """
        files, missing = self._listed(table, since_ns)
        return sorted((*files, *missing), key=lambda file: (file.written_ns, file.name))

    def files(self, table: str, since_ns: int = 0) -> list[Path]:
        """Return `visible` as paths, which can be opened where the store is a folder."""
        return [Path(self.place.address(file.key)) for file in self.visible(table, since_ns)]

    def footer(self, path: Path | StoredFile) -> pq.FileMetaData:
        """Return the footer of one of `files` or `visible`, wherever the store is."""
        key = path.key if isinstance(path, StoredFile) else "/".join(path.parts[-4:])
        with self.place.open(key) as source:
            return pq.read_metadata(source)

    def scan(self, table: str, since_ns: int = 0) -> pl.LazyFrame:
        """Return the rows of `files(table, since_ns)`, duplicates dropped, or no rows.

        The files are those of this moment, and stay for 15 minutes after they are merged: collect
        within that time, or with `collect`. Raises PartialInputError that names a file which is
        missing or cut off.
        """
        rows = self.scan_as_received(table, since_ns)
        return _newest_version(rows) if table == REQUESTS.name else _once(rows, TABLES[table])

    def scan_as_received(self, table: str, since_ns: int = 0) -> pl.LazyFrame:
        """Return `scan` with re-sent rows and old versions: faster, where these do no harm."""
        files = self._present(table, since_ns)
        if not files:
            return empty_frame(TABLES[table])
        require_whole(self.place, files)
        return self._scan(table, files)

    def collect(
        self,
        table: str,
        query: Callable[[pl.LazyFrame], pl.LazyFrame] = lambda rows: rows,
        *,
        since_ns: int = 0,
        as_received: bool = False,
    ) -> pl.DataFrame:
        """Return the rows that a query makes of `scan`, however long it takes.

        If files go meanwhile it begins again with those that replace them. Raises
        PartialInputError that names a damaged file.
        """
        scan = self.scan_as_received if as_received else self.scan
        return self._again(table, lambda: query(scan(table, since_ns)).collect(), since_ns)

    def read_as_received(
        self, table: str, columns: Sequence[str], encoded: Sequence[str], since_ns: int = 0
    ) -> Iterator[pa.Table]:
        """Yield columns (or leaves, by Parquet's names) file by file as Arrow tables.

        What is in `encoded` stays as Parquet's dictionaries: cheap where values repeat. Raises
        PartialInputError that names a damaged file, or says that files went meanwhile.
        """
        for stored in self._present(table, since_ns):
            try:
                with self.place.open(stored.key) as source:
                    rows = _read_columns(source, columns, encoded)
            except FileNotFoundError as error:
                raise self._vanished(table) from error
            except (pa.ArrowException, OSError) as error:
                where = self.place.address(stored.key)
                raise PartialInputError(f"cannot read {where}: {error}") from error
            yield _with_nulls(rows, columns, encoded, TABLES[table])

    def trace(self, trace_id: bytes) -> pl.DataFrame:
        """Return all spans of a trace by their start, duplicates dropped.

        The first call reads the ids of all files; later ones only those of new files.
        """
        return self._again(SPANS.name, lambda: self._trace(trace_id))

    def require(self, table: str) -> pl.LazyFrame:
        """Return `scan(table)`; raises NoDataError where the table has no file at all."""
        if not self.visible(table):
            where = f"store {self.url}, namespace {self.namespace}"
            raise NoDataError(
                f"no {table} in this store",
                where=where,
                fix="start `perfledger collect` on this store and send it telemetry",
            )
        return self.scan(table)

    def _listed(self, table: str, since_ns: int) -> tuple[list[StoredFile], list[StoredFile]]:
        """Return the files that count, and the merged ones that are missing."""
        snapshot = self.snapshot(table, since_ns)
        gone = [file for file in snapshot.unlisted() if not self.place.exists(file.key)]
        files = [file for file in snapshot.visible if file not in gone]
        missing = []
        for file in gone:
            sources = snapshot.sources_of(file)
            files += sources
            missing += [] if sources else [file]
        files.sort(key=lambda file: (file.written_ns, file.name))
        return (
            [file for file in files if file.written_ns >= since_ns],
            [file for file in missing if file.written_ns >= since_ns],
        )

    def _present(self, table: str, since_ns: int = 0) -> list[StoredFile]:
        """Return `visible`; raises PartialInputError where one is missing, not merged meanwhile."""
        for _ in range(_RETRIES):
            files, missing = self._listed(table, since_ns)
            if not missing:
                return files
        raise missing_file(self.place, missing[0])

    def _scan(
        self, table: str, files: Sequence[StoredFile], *, is_search: bool = False
    ) -> pl.LazyFrame:
        """Scan files; columns that they lack are null."""
        remote = self.place.polars_options
        return pl.scan_parquet(
            [self.place.address(file.key) for file in files],
            glob=False,
            parallel="none" if is_search else "auto",  # few rows of one row group
            schema=_polars_schema(table),
            missing_columns="insert",
            extra_columns="ignore",
            cast_options=pl.ScanCastOptions(missing_struct_fields="insert"),
            storage_options=remote,
            credential_provider="auto" if remote is None else None,
        )

    def _trace(self, trace_id: bytes) -> pl.DataFrame:
        found = [
            self._scan(SPANS.name, [file], is_search=True).slice(*rows)
            for file in self._present(SPANS.name)
            if (rows := self._rows_of(trace_id, file))
        ]
        if not found:
            return _no_spans()
        spans = pl.concat([one.collect() for one in found])
        # In Python: a handful of rows, and polars takes longer to begin than this takes.
        keys = spans.select("trace_id", "start_ns", "end_ns", "span_id", "name").rows()
        rows_of = {key: at for at, key in reversed(list(enumerate(keys))) if key[0] == trace_id}
        chosen = [rows_of[key] for key in sorted(rows_of)]
        return spans if chosen == list(range(len(spans))) else spans[chosen]

    def _again(
        self, table: str, read: Callable[[], pl.DataFrame], since_ns: int = 0
    ) -> pl.DataFrame:
        """Read, with a new snapshot when files have gone; say which file an error is about."""
        for _ in range(_RETRIES):
            try:
                return read()
            except FileNotFoundError:
                continue
            except _FAILURES as error:
                told = explain(self.place, self.visible(table, since_ns), TABLES[table])
                raise told or error from error
        raise self._vanished(table)

    def _rows_of(self, trace_id: bytes, file: StoredFile) -> tuple[int, int] | None:
        return self._traces.of(file.key, lambda: self.place.open(file.key)).find(trace_id)

    def _vanished(self, table: str) -> PartialInputError:
        where = f"store {self.url}, namespace {self.namespace}"
        return PartialInputError(
            f"files of {table} were merged or deleted while they were read",
            where=where,
            fix="ask again; compact with a longer --grace if this goes on",
        )


def written_ns(path: Path) -> int:
    """Return when a file of the store was written (wall ns), from its name."""
    return int(path.name.partition("-")[0])


def empty_frame(table: Table) -> pl.LazyFrame:
    """Return a frame of a table's columns and no rows."""
    frame = pl.from_arrow(table.arrow().empty_table())
    assert isinstance(frame, pl.DataFrame)
    return frame.lazy()


@cache
def _polars_schema(table: str) -> pl.Schema:
    return empty_frame(TABLES[table]).collect_schema()


def _read_columns(
    source: pa.NativeFile, columns: Sequence[str], encoded: Sequence[str]
) -> pa.Table:
    """Read those of the columns that a file has."""
    footer = pq.read_metadata(source)
    leaves = {footer.schema.column(at).path for at in range(footer.num_columns)}
    coded = [name for name in encoded if name in leaves]
    # pyarrow makes no lists of a leaf that has several dictionaries: one a row group, and more
    # where a writer gave its dictionary up within one.
    try:
        return _read_groups(source, footer, columns, coded)
    except pa.ArrowNotImplementedError:
        return _read_groups(source, footer, columns, [name for name in coded if "." not in name])


def _read_groups(
    source: pa.NativeFile, footer: pq.FileMetaData, columns: Sequence[str], coded: Sequence[str]
) -> pa.Table:
    """Read columns with the dictionaries of `coded`, row group after row group where it must be."""
    with pq.ParquetFile(source, metadata=footer, read_dictionary=list(coded)) as file:
        if footer.num_row_groups <= 1 or all("." not in name for name in coded):
            return file.read(columns=list(columns))
        groups = range(footer.num_row_groups)
        return pa.concat_tables(file.read_row_group(at, columns=list(columns)) for at in groups)


def _with_nulls(
    rows: pa.Table, columns: Sequence[str], encoded: Sequence[str], table: Table
) -> pa.Table:
    """Add the columns that a file lacks because they are null in each of its rows."""
    for name in columns:
        if "." not in name and name not in rows.column_names:
            kind = table.arrow().field(name).type
            kind = pa.dictionary(pa.int32(), kind) if name in encoded else kind
            rows = rows.append_column(name, pa.nulls(rows.num_rows, kind))
    return rows


@cache
def _no_spans() -> pl.DataFrame:
    return empty_frame(SPANS).collect()


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
