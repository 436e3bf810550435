"""Is what is stored still what was written? Every file is read, every checksum compared.

A file's checksum covers all of it; what was wrong when it was written is found by its schema, sort
order, hour and required columns. Rows that are there twice are no fault: senders repeat
themselves, and readers and compaction drop those.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from perfledger.collectors.upkeep.merging import sent_again
from perfledger.collectors.wal.log_quarantine import Damage, Quarantine
from perfledger.collectors.wal.log_segments import find_segments
from perfledger.schema.columns import Table
from perfledger.schema.errors import PartialInputError
from perfledger.schema.store import Store
from perfledger.schema.store_files import as_declared, has_checksum, is_whole
from perfledger.schema.store_snapshot import Snapshot, StoredFile, hour_of
from perfledger.schema.tables import TABLES

_BATCH_ROWS = 65_536
# A compactor takes seconds from its merged file to the marker.
_UNNAMED_S = 900
# The same in all tables that have it: what makes two rows one span's.
_IDS = ("trace_id", "span_id")


@dataclass(frozen=True)
class Problem:
    """Something that should not be."""

    where: str
    what: str


@dataclass
class StoreCheck:
    """What was looked at, and what is wrong with it."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)


def check_store(
    store: Store,
    *,
    tables: Sequence[str] = tuple(TABLES),
    log_folder: Path | None = None,
    advance: Callable[[], None] = lambda: None,
) -> StoreCheck:
    """Read everything that counts, and the write-ahead log in a folder; change nothing.

    `advance` is called after each file. Files that go meanwhile, merged or dropped, are no problem.
    """
    check = StoreCheck()
    for table in tables:
        try:
            snapshot = store.snapshot(table)
        except PartialInputError as error:
            check.problems.append(Problem(error.where or store.url, error.what))
            continue
        check.problems += _unnamed(store, snapshot)
        check.counts["markers"] += len(snapshot.markers)
        check.counts["files_unseen"] += len(set(snapshot.found) - set(snapshot.visible))
        for file in snapshot.visible:
            _check_file(store, table, file, check)
            advance()
    if log_folder is not None:
        _check_log(log_folder, check)
    return check


def _unnamed(store: Store, snapshot: Snapshot) -> Iterator[Problem]:
    """Yield merged files whose marker is missing.

    Those that a compactor has just made, or made in vain, are none.
    """
    latest_ns = time.time_ns() - _UNNAMED_S * 10**9
    for file in snapshot.unnamed():
        where = store.place.address(file.key)
        if not snapshot.is_spare(file):
            what = "its marker is missing, and its rows do not count: put it back from a copy"
            yield Problem(where, what)
        elif (
            file.generation >= snapshot.next_generation(file.hour) and file.modified_ns < latest_ns
        ):
            yield Problem(where, "its marker is missing; its rows count from the files it replaces")


def _check_file(store: Store, table: str, file: StoredFile, check: StoreCheck) -> None:
    declared = TABLES[table]
    where = store.place.address(file.key)
    try:
        content = store.place.read(file.key)
        if not is_whole(content):
            raise PartialInputError("its checksum differs")
        with pq.ParquetFile(pa.BufferReader(content)) as parquet:
            told = _FileCheck(declared, parquet.metadata.num_rows)
            for batch in parquet.iter_batches(_BATCH_ROWS, use_threads=False):
                told.add(as_declared(pa.Table.from_batches([batch]), declared))
    except FileNotFoundError:
        if file in store.snapshot(table).visible:
            check.problems.append(Problem(where, "it is not there, but its marker is"))
        return
    except (pa.ArrowException, OSError, ValueError, PartialInputError) as error:
        said = error.what if isinstance(error, PartialInputError) else str(error)
        check.problems.append(Problem(where, (said.splitlines() or [type(error).__name__])[0]))
        return
    problems = told.problems()
    if file.hour != hour_of(file.written_ns):
        problems.append(f"it lies in another hour than its name says, {file.hour}")
    check.problems += [Problem(where, problem) for problem in problems]
    check.counts += Counter(files=1, bytes=file.bytes, rows=told.rows)
    check.counts += Counter(files_without_checksum=int(not has_checksum(content)))
    check.counts += Counter(rows_sent_again=told.sent_again, ids_in_conflict=told.conflicts)


class _FileCheck:
    """Looks at a file's rows batch by batch."""

    def __init__(self, table: Table, wanted_rows: int) -> None:
        self._table = table
        self._wanted_rows = wanted_rows
        self._last: pl.DataFrame | None = None
        self._unsorted_at: int | None = None
        self._nulls: Counter[str] = Counter()
        self.rows = 0
        self.sent_again = 0
        self.conflicts = 0

    def add(self, rows: pa.Table) -> None:
        """Look at the next rows; equal ids stand together, as the file is sorted."""
        for column in self._table.columns:
            if column.required:
                self._nulls[column.name] += rows[column.name].null_count
        keys = pl.DataFrame(rows.select(list(self._table.sort)))
        ordered = keys if self._last is None else pl.concat([self._last, keys])
        wrong = np.flatnonzero(~_is_ordered(ordered))
        if len(wrong) and self._unsorted_at is None:
            self._unsorted_at = self.rows + int(wrong[0]) + (self._last is None)
        self._last = keys.tail(1)
        again = len(sent_again(rows, self._table))
        self.sent_again += again
        if set(_IDS) <= set(rows.column_names) and self._table.key[:2] == _IDS:
            ids = pl.DataFrame(rows.select(list(_IDS)))
            self.conflicts += len(ids) - ids.n_unique() - again
        self.rows += rows.num_rows

    def problems(self) -> list[str]:
        """Return what is wrong."""
        found = [f"{count} nulls in {name}" for name, count in self._nulls.items() if count]
        if self._unsorted_at is not None:
            found.append(f"row {self._unsorted_at} is out of order")
        if self.rows != self._wanted_rows:
            found.append(f"{self.rows} rows, its footer says {self._wanted_rows}")
        return found


def _is_ordered(keys: pl.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return for each row but the first whether it is not before the one above it; nulls last."""
    before, equal = pl.lit(False), pl.lit(True)
    for name in keys.columns:
        above, here = pl.col(name).shift(1), pl.col(name)
        before |= equal & ((above < here) | (above.is_not_null() & here.is_null()))
        equal &= above.eq_missing(here)
    told = keys.select(ordered=(before | equal).fill_null(False))
    return told["ordered"].to_numpy()[1:]


class _Noted(Quarantine):
    """A quarantine that takes nothing: a check changes nothing."""

    def __init__(self, folder: Path, check: StoreCheck) -> None:
        super().__init__(folder)
        self._check = check

    def move(self, path: Path, reason: str, *, is_torn: bool = False) -> None:
        self._note(path, reason, is_torn)

    def copy(self, path: Path, damage: Damage) -> None:
        self._note(path, f"bytes {damage.start} to {damage.end} are no record", damage.is_torn)

    def _note(self, path: Path, reason: str, is_torn: bool) -> None:
        if is_torn:  # the end of what a running collector writes, or of one that was killed
            self._check.counts["log_files_torn"] += 1
        else:
            self._check.problems.append(Problem(str(path), reason))


def _check_log(folder: Path, check: StoreCheck) -> None:
    for segment in find_segments(folder, _Noted(folder, check)):
        check.counts["log_segments"] += 1
        try:
            check.counts["log_records"] += sum(1 for _ in segment.records())
        except FileNotFoundError:  # its rows are a file by now
            continue
