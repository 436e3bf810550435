"""Compaction: the small files of an hour become few sorted ones, and nobody sees the change.

The commit is the marker (schema/store_snapshot.py). Until it is there the merged file does not
count; once it is, its sources do not. It is created exclusively under the next generation of its
hour: of several compactors, or one that slept, the first commits and the others throw away what
they made. Killed at any instant, all that is left is a merged file that never counts.

What is deleted, and when: sources, a grace after their marker, because readers may still be at
them, and only if what replaces them is there and whole; merged files that can never count, because
their generation is another's; scratch files after a day. The lease keeps two compactors from doing
the same work, and decides nothing.

Only files some minutes old are taken. The log segment that a file was made of is gone by then, so
that in the normal course no file is written again after it was replaced. (After a crash it may be:
the marker, which stays, then still replaces it.)
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import pyarrow as pa
import pyarrow.parquet as pq

from perfledger.collectors.upkeep.merging import merge, read_file
from perfledger.schema.errors import PartialInputError
from perfledger.schema.store import Store
from perfledger.schema.store_files import encode, is_outdated, is_whole
from perfledger.schema.store_places import WRITING
from perfledger.schema.store_snapshot import (
    MARKERS,
    Marker,
    Snapshot,
    StoredFile,
    file_key,
    hour_of,
    marker_key,
)
from perfledger.schema.tables import TABLES

DAY_S = 86_400
_LEASE = ".lease"


@dataclass(frozen=True)
class CompactionLimits:
    """When files are merged, into what, and when the old ones are deleted."""

    min_age_s: float = 300.0
    unfinished_files: int = 8  # of an hour that goes on, so that few rows are merged often
    max_rows: int = 256_000  # of a merged file: the footer of a larger one slows finding a trace
    max_bytes: int = 256 << 20  # of rows in memory; the process needs about three times that
    grace_s: float = 900.0
    lease_s: float = 300.0
    drop_marker_s: float = 7 * DAY_S


@dataclass
class Compaction:
    """What was done: counts, the names of files that are damaged or missing, and of those that
    stay because what replaces them is."""

    counts: Counter[str] = field(default_factory=Counter)
    damaged: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Work:
    store: Store
    table: str
    limits: CompactionLimits
    done: Compaction
    now_ns: Callable[[], int]


def compact(
    store: Store,
    limits: CompactionLimits | None = None,
    *,
    tables: Sequence[str] = tuple(TABLES),
    now_ns: Callable[[], int] = time.time_ns,
    advance: Callable[[], None] = lambda: None,
) -> Compaction:
    """Merge what can be merged, then delete what has been replaced for longer than the grace.

    Safe beside readers, writers, retention and other compactors. `advance` is called after each
    table. Raises OSError where the store cannot be written.
    """
    done = Compaction()
    for table in tables:
        work = _Work(store, table, limits or CompactionLimits(), done, now_ns)
        hours = sorted({file.hour for file in store.snapshot(table).visible})
        for hour in hours:
            while _merge_some(work, hour):
                pass
        _clean(work)
        advance()
    return done


def clean(
    store: Store,
    limits: CompactionLimits | None = None,
    *,
    tables: Sequence[str] = tuple(TABLES),
    now_ns: Callable[[], int] = time.time_ns,
) -> Compaction:
    """Delete what has been replaced or dropped for longer than the grace."""
    done = Compaction()
    for table in tables:
        _clean(_Work(store, table, limits or CompactionLimits(), done, now_ns))
    return done


def _merge_some(work: _Work, hour: str) -> bool:
    """Merge one file's worth of an hour; return whether there may be more to do."""
    snapshot = work.store.snapshot(work.table)
    generation = snapshot.next_generation(hour)
    waiting = _candidates(work, snapshot, hour)
    if not waiting or not _take_lease(work, hour, generation):
        return False
    sources, parts = _read(work, waiting)
    if len(sources) < min(2, len(waiting)):
        return False
    rows, batches = merge(parts, TABLES[work.table])
    newest_ns = max(file.written_ns for file in sources)
    name = f"{newest_ns}-{secrets.token_hex(4)}-{generation}.parquet"
    content = encode(batches, TABLES[work.table])
    key = file_key(work.store.namespace, work.table, name, hour)
    work.store.place.create(key, content)
    replaces = tuple(file.name for file in sources)
    marker = Marker(hour, generation, work.now_ns(), name, content.size, rows, replaces)
    if commit(work.store, work.table, marker):
        work.done.counts["files_merged"] += len(sources)
        work.done.counts["files_made"] += 1
        work.done.counts["rows"] += rows
        work.done.counts["rows_sent_again"] += sum(part.num_rows for part in parts) - rows
    else:
        work.done.counts["races_lost"] += 1
        work.store.place.delete(key)  # its generation is another's: it could never count
    work.store.place.delete(_lease_key(work, hour, generation))
    return True


def commit(store: Store, table: str, marker: Marker) -> bool:
    """Create a marker; return False where its generation is another's.

    After an OSError nobody knows whether it was created: whatever it names has to stay.
    """
    key = marker_key(store.namespace, table, marker.hour, marker.generation)
    content = marker.content()
    if store.place.create(key, content):
        return True
    # The client of an object store may have repeated a request whose answer was lost.
    return bool(store.place.read(key).equals(content))


def _candidates(work: _Work, snapshot: Snapshot, hour: str) -> list[StoredFile]:
    """Return the small files of an hour that have been there for a while; none if too few."""
    latest_ns = work.now_ns() - int(work.limits.min_age_s * 1e9)
    aged = [
        file
        for file in snapshot.visible
        if file.hour == hour and max(file.written_ns, file.modified_ns) <= latest_ns
    ]
    unread = [file for file in aged if work.store.place.address(file.key) not in work.done.damaged]
    footers = {file: _footer(work, file) for file in unread}
    if old := [file for file, footer in footers.items() if footer and _is_old(work, footer)]:
        return old[:1]
    small = [file for file, footer in footers.items() if footer and _is_small(work, footer)]
    wanted = 2 if hour < hour_of(latest_ns) else work.limits.unfinished_files
    return small if len(small) >= wanted else []


def _footer(work: _Work, file: StoredFile) -> pq.FileMetaData | None:
    try:
        return work.store.footer(file)
    except FileNotFoundError:
        return None
    except (pa.ArrowException, OSError):
        _note_damage(work, file)
        return None


def _is_old(work: _Work, footer: pq.FileMetaData) -> bool:
    """Return whether a file is of an older version, and is written anew for that alone."""
    return is_outdated(footer.schema.to_arrow_schema(), TABLES[work.table])


def _is_small(work: _Work, footer: pq.FileMetaData) -> bool:
    """Return whether a file is under half of a full one, so that merging it is worth while."""
    groups = [footer.row_group(at).total_byte_size for at in range(footer.num_row_groups)]
    full = footer.num_rows * 2 > work.limits.max_rows or sum(groups) * 2 > work.limits.max_bytes
    return not full


def _read(work: _Work, files: Sequence[StoredFile]) -> tuple[list[StoredFile], list[pa.Table]]:
    """Read the first files that fit into one; those that are damaged are noted and left alone."""
    sources: list[StoredFile] = []
    parts: list[pa.Table] = []
    rows = size = 0
    for file in files:
        try:
            part = read_file(work.store.place, file, TABLES[work.table])
        except FileNotFoundError:
            continue
        except (pa.ArrowException, OSError, PartialInputError):
            _note_damage(work, file)
            continue
        rows, size = rows + part.num_rows, size + part.nbytes
        if len(sources) >= 2 and (rows > work.limits.max_rows or size > work.limits.max_bytes):
            break
        sources.append(file)
        parts.append(part)
    return sources, parts


def _note_damage(work: _Work, file: StoredFile) -> None:
    _note(work, work.store.place.address(file.key))


def _note(work: _Work, where: str) -> None:
    if where not in work.done.damaged:
        work.done.damaged.append(where)
        work.done.counts["files_damaged"] += 1


def _take_lease(work: _Work, hour: str, generation: int) -> bool:
    """Return whether no other compactor said lately that it is at this generation."""
    key = _lease_key(work, hour, generation)
    place = work.store.place
    if place.create(key, pa.py_buffer(b"")):
        return True
    folder = key.rpartition("/")[0]
    taken = [entry.modified_ns for entry in place.list(folder) if entry.key == key]
    if taken and work.now_ns() - taken[0] < work.limits.lease_s * 1e9:
        work.done.counts["hours_leased"] += 1
        return False
    place.delete(key)
    return place.create(key, pa.py_buffer(b""))


def _lease_key(work: _Work, hour: str, generation: int) -> str:
    key = marker_key(work.store.namespace, work.table, hour, generation)
    return key.removesuffix(".json") + _LEASE


def _clean(work: _Work) -> None:
    """Delete what no reader can see or be at any more."""
    snapshot = work.store.snapshot(work.table)
    for key in (*_deletable(work, snapshot), *_left_over(work, snapshot)):
        work.store.place.delete(key)
        work.done.counts["files_deleted"] += 1
    for chain in _ended_chains(work, snapshot):
        for marker in chain:  # the drop last: before it is gone, nothing of the hour counts
            key = marker_key(work.store.namespace, work.table, marker.hour, marker.generation)
            work.store.place.delete(key)


def _deletable(work: _Work, snapshot: Snapshot) -> Iterator[str]:
    """Yield data files: replaced or dropped for longer than the grace, or never to count."""
    before_ns = work.now_ns() - int(work.limits.grace_s * 1e9)
    old = [marker for marker in snapshot.markers if marker.created_ns <= before_ns]
    replaced = {(marker.hour, name) for marker in old for name in marker.replaces}
    dropped = {marker.hour for marker in old if marker.dropped}
    last = snapshot.replacements()
    stands: dict[str, bool] = {}
    for file in snapshot.found:
        if file.hour in dropped:
            yield file.key
        elif (file.hour, file.name) in replaced:
            marker = last[file.hour, file.name]
            if marker.file not in stands:
                stands[marker.file] = _stands(work, marker)
            if stands[marker.file]:
                yield file.key
            else:
                work.done.kept.append(work.store.place.address(file.key))
    for file in snapshot.unnamed():
        if file.generation < snapshot.next_generation(file.hour) and snapshot.is_spare(file):
            yield file.key


def _stands(work: _Work, marker: Marker) -> bool:
    """Return whether a merged file is there and whole; it is noted if not."""
    store = work.store
    key = file_key(store.namespace, work.table, marker.file, marker.hour)
    try:
        content = store.place.read(key)
        footer = pq.read_metadata(pa.BufferReader(content))
        if footer.num_rows == marker.rows and is_whole(content):
            return True
    except FileNotFoundError:
        visible = store.snapshot(work.table).visible
        if all(file.key != key for file in visible):  # merged or dropped meanwhile
            return False
    except (pa.ArrowException, OSError):
        pass
    _note(work, store.place.address(key))
    return False


def _left_over(work: _Work, snapshot: Snapshot) -> Iterator[str]:
    """Yield the scratch files of writers that died, and leases that have run out."""
    place, namespace = work.store.place, work.store.namespace
    day_ago_ns = work.now_ns() - DAY_S * 10**9
    expired_ns = work.now_ns() - int(work.limits.lease_s * 1e9)
    for entry in place.list(f"{namespace}/{work.table}"):
        if entry.key.endswith(WRITING) and entry.modified_ns < day_ago_ns:
            yield entry.key
    for entry in place.list(f"{namespace}/{MARKERS}/{work.table}"):
        if entry.key.endswith(_LEASE):
            hour, generation, _ = entry.key.rpartition("/")[2].split(".")
            if int(generation) < snapshot.next_generation(hour) or entry.modified_ns < expired_ns:
                yield entry.key


def _ended_chains(work: _Work, snapshot: Snapshot) -> Iterator[list[Marker]]:
    """Yield the markers of hours that were dropped long ago and have no file left.

    Long, because a compactor that slept since then could take a generation that is free again.
    """
    before_ns = work.now_ns() - int(work.limits.drop_marker_s * 1e9)
    left = {file.hour for file in snapshot.found}
    ordered = sorted(snapshot.markers, key=lambda marker: (marker.hour, marker.generation))
    for hour, markers in groupby(ordered, key=lambda marker: marker.hour):
        chain = list(markers)
        if hour not in left and chain[-1].dropped and chain[-1].created_ns < before_ns:
            yield chain
