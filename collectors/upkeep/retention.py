"""Retention: whole hours of a table are dropped, by age or by size, the oldest first.

A drop is one marker, so an hour goes for all readers at once; its files are deleted by a later
`clean`, a grace afterwards. Hours with rows of a run that a kept verdict cites are never dropped,
nor are hours whose runs cannot be read, nor the hour that goes on. A verdict that is written while
its runs' hours are being dropped comes too late.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from perfledger.collectors.upkeep.compaction import commit
from perfledger.schema.errors import PerfledgerError
from perfledger.schema.store import Store
from perfledger.schema.store_snapshot import Marker, StoredFile
from perfledger.schema.tables import TABLES

_RACES = 20

_LATE_FILES_S = 3600


@dataclass(frozen=True)
class RetentionRule:
    """What goes: hours older than `max_age_s`, and the oldest while a table has more bytes."""

    max_age_s: float | None = None
    max_bytes: int | None = None


@dataclass(frozen=True)
class Hour:
    """One hour of a table that the rule is over. `kept_because` says why it stays, if it does."""

    table: str
    hour: str
    files: int
    bytes: int
    kept_because: str = ""


def plan(
    store: Store,
    rule: RetentionRule,
    *,
    tables: Sequence[str] = tuple(TABLES),
    now_ns: int | None = None,
) -> list[Hour]:
    """Return the hours that the rule is over, those that have to stay too."""
    now_ns = time.time_ns() if now_ns is None else now_ns
    cited = cited_runs(store)
    found: list[Hour] = []
    for table in tables:
        for hour, files in _over(store, table, rule, now_ns):
            size = sum(file.bytes for file in files)
            why = _why_kept(store, table, files, cited)
            found.append(Hour(table, hour, len(files), size, why))
    return found


def drop(
    store: Store, hours: Sequence[Hour], *, now_ns: Callable[[], int] = time.time_ns
) -> list[Hour]:
    """Drop the hours of a plan that need not stay, and return these."""
    gone = [hour for hour in hours if not hour.kept_because]
    for hour in gone:
        _drop(store, hour, now_ns)
    return gone


def cited_runs(store: Store) -> frozenset[str]:
    """Return every text in the rows of `runs` that have a verdict: among them the runs cited."""
    verdicts = store.collect("runs", lambda rows: rows.filter(pl.col("verdict").is_not_null()))
    cited: set[str] = set(verdicts["run_id"])
    for name in ("manifest", "samples", "verdict"):
        for document in verdicts[name].drop_nulls():
            cited.update(_texts(json.loads(document)))
    return frozenset(cited)


def _over(
    store: Store, table: str, rule: RetentionRule, now_ns: int
) -> Iterator[tuple[str, list[StoredFile]]]:
    """Yield the hours that a rule is over with their files, oldest first."""
    hours: dict[str, list[StoredFile]] = {}
    for file in store.visible(table):
        hours.setdefault(file.hour, []).append(file)
    total = sum(file.bytes for files in hours.values() for file in files)
    for hour in sorted(hours):
        age_s = now_ns / 1e9 - _end_s(hour)
        too_old = rule.max_age_s is not None and age_s > rule.max_age_s
        too_much = rule.max_bytes is not None and total > rule.max_bytes
        # The last segment of an hour may become a file some time after it.
        if age_s > _LATE_FILES_S and (too_old or too_much):
            yield hour, hours[hour]
            total -= sum(file.bytes for file in hours[hour])


def _end_s(hour: str) -> float:
    begin = datetime.strptime(hour, "%Y-%m-%dT%H").replace(tzinfo=UTC)
    return (begin + timedelta(hours=1)).timestamp()


def _why_kept(store: Store, table: str, files: Sequence[StoredFile], cited: frozenset[str]) -> str:
    if not cited or "run_id" not in TABLES[table].names():
        return ""
    for file in files:
        try:
            with store.place.open(file.key) as source, pq.ParquetFile(source) as parquet:
                rows = parquet.read(columns=["run_id"])
        except FileNotFoundError:
            return "its files are being merged"
        except (pa.ArrowException, OSError):
            return f"{file.name} cannot be read"
        runs = rows["run_id"].unique().to_pylist() if rows.num_columns else []
        if found := cited.intersection(run for run in runs if run):
            return f"a verdict cites run {min(found)}"
    return ""


def _drop(store: Store, hour: Hour, now_ns: Callable[[], int]) -> None:
    """Create the marker; while compactors are faster, under the next generation."""
    for _ in range(_RACES):
        snapshot = store.snapshot(hour.table)
        if hour.hour in snapshot.dropped_hours:
            return
        generation = snapshot.next_generation(hour.hour)
        if commit(store, hour.table, Marker(hour.hour, generation, now_ns(), dropped=True)):
            return
    raise PerfledgerError(f"cannot drop {hour.table} {hour.hour}: it is compacted all the while")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
