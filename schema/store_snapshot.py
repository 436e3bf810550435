"""Which files of a table count at one instant, while others merge and delete them.

Files lie at `<namespace>/<table>/<hour>/<ns>-<random>.parquet`; the hour is that of the ns in the
name, when the rows were received. A merged file has a third part in its name, its generation.

Each hour of a table has a chain of markers `<namespace>/markers/<table>/<hour>.<generation>.json`.
Marker n names one merged file and the files that it replaces, or drops the whole hour. It is the
commit: a merged file without its marker does not count, and a replaced file counts no longer.
A marker is created exclusively, so of two compactors that aim at generation n one loses, and its
file is never seen; no file can be replaced twice. A marker stays as long as its hour: a file that
is written again under its old name (a replayed log) is still replaced.

A reader lists the files first and the markers afterwards. Files are deleted long after the marker
that replaces them was created, so whoever misses a deleted file sees its marker. And a merged file
is known from its marker, so whoever sees the marker cannot miss it.
"""

import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import pyarrow as pa

from perfledger.schema.errors import PartialInputError
from perfledger.schema.store_places import Entry, Place

MARKERS = "markers"
_FILE = re.compile(r"(\d+)-[0-9a-zA-Z]+(?:-(\d+))?\.parquet")
_MARKER = re.compile(r"(?P<hour>[0-9T-]+)\.(?P<generation>\d{6})\.json")
_LISTINGS = 5


@dataclass(frozen=True)
class StoredFile:
    """A file of rows. `generation` is 0 for one as received; times are wall ns."""

    key: str
    bytes: int
    modified_ns: int = 0

    @property
    def name(self) -> str:
        return self.key.rpartition("/")[2]

    @property
    def hour(self) -> str:
        return self.key.split("/")[-2]

    @property
    def written_ns(self) -> int:
        """When its newest rows were written."""
        return int(self.name.partition("-")[0])

    @property
    def generation(self) -> int:
        match = _FILE.fullmatch(self.name)
        return int(match[2] or 0) if match else 0


@dataclass(frozen=True)
class Marker:
    """One change of an hour: `file` replaces `replaces`; with `dropped`, nothing counts."""

    hour: str
    generation: int
    created_ns: int
    file: str = ""
    bytes: int = 0
    rows: int = 0
    replaces: tuple[str, ...] = ()
    dropped: bool = False

    def content(self) -> pa.Buffer:
        """Return the marker as it is stored, with a checksum of all the rest."""
        told = {**self.__dict__, "replaces": list(self.replaces)}
        return pa.py_buffer(json.dumps({**told, "crc32": _checksum(told)}, indent=1).encode())


@dataclass(frozen=True)
class Snapshot:
    """What a listing found: the files that count, all files that are there, and the markers."""

    visible: tuple[StoredFile, ...]
    found: tuple[StoredFile, ...]
    markers: tuple[Marker, ...]

    def next_generation(self, hour: str) -> int:
        """Return the generation that the next marker of an hour has."""
        return 1 + max((m.generation for m in self.markers if m.hour == hour), default=0)

    def unlisted(self) -> list[StoredFile]:
        """Return merged files that count and were not listed: made meanwhile, or missing."""
        listed = {file.key for file in self.found}
        return [file for file in self.visible if file.key not in listed]

    def sources_of(self, file: StoredFile) -> list[StoredFile]:
        """Return the files that a merged one was made of, or none if they are not all there."""
        wanted = {
            name
            for marker in self.markers
            if (marker.hour, marker.file) == (file.hour, file.name)
            for name in marker.replaces
        }
        there = [one for one in self.found if one.hour == file.hour and one.name in wanted]
        return there if len(there) == len(wanted) else []

    def replacements(self) -> dict[tuple[str, str], Marker]:
        """Return for the hour and name of each replaced file which marker's file has its rows."""
        ordered = sorted(self.markers, key=lambda marker: -marker.generation)
        last: dict[tuple[str, str], Marker] = {}
        for marker in ordered:  # what replaced its file, if anything, came before it here
            now = last.get((marker.hour, marker.file), marker)
            last.update(dict.fromkeys([(marker.hour, name) for name in marker.replaces], now))
        return last

    def unnamed(self) -> list[StoredFile]:
        """Return the merged files that no marker names, of hours that are not dropped."""
        named = {(marker.hour, marker.file) for marker in self.markers}
        dropped = self.dropped_hours
        return [
            file
            for file in self.found
            if file.generation and (file.hour, file.name) not in named and file.hour not in dropped
        ]

    def is_spare(self, file: StoredFile) -> bool:
        """Return whether the rows of an unnamed merged file count without it.

        Its name has the time of its newest source. Of a compactor that was killed or lost a race
        this is still there or in a marker; where the marker was lost, it is neither.
        """
        counted = {one.written_ns for one in self.visible if one.hour == file.hour}
        replaced = {
            int(name.partition("-")[0])
            for marker in self.markers
            if marker.hour == file.hour
            for name in marker.replaces
        }
        return file.written_ns in counted | replaced

    @property
    def dropped_hours(self) -> frozenset[str]:
        return frozenset(marker.hour for marker in self.markers if marker.dropped)


def hour_of(wall_ns: int) -> str:
    """Return the name of the folder of what was received at a time."""
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).strftime("%Y-%m-%dT%H")


def file_key(namespace: str, table: str, name: str, hour: str = "") -> str:
    """Return the key of a file; its hour is that in its name, unless it is merged."""
    hour = hour or hour_of(int(name.partition("-")[0]))
    return f"{namespace}/{table}/{hour}/{name}"


def marker_key(namespace: str, table: str, hour: str, generation: int) -> str:
    """Return the key of a marker."""
    return f"{namespace}/{MARKERS}/{table}/{hour}.{generation:06d}.json"


def count_visible(
    found: Iterable[StoredFile], markers: Iterable[Marker], folder: str
) -> list[StoredFile]:
    """Return the files that count, oldest first: as received or named by a marker, not replaced.

    `folder` is the key of the table's folder.
    """
    files = {file.key: file for file in found}
    merged: dict[str, StoredFile] = {}
    replaced: set[tuple[str, str]] = set()
    dropped: set[str] = set()
    for marker in markers:
        replaced.update((marker.hour, name) for name in marker.replaces)
        if marker.dropped:
            dropped.add(marker.hour)
        elif marker.file:
            key = f"{folder}/{marker.hour}/{marker.file}"
            merged[key] = files.get(key, StoredFile(key, marker.bytes, marker.created_ns))
    plain = [file for file in files.values() if not file.generation]
    counted = [
        file
        for file in (*plain, *merged.values())
        if file.hour not in dropped and (file.hour, file.name) not in replaced
    ]
    return sorted(counted, key=lambda file: (file.written_ns, file.name))


class Snapshots:
    """Takes snapshots of a namespace; remembers the markers that it has read."""

    def __init__(self, place: Place, namespace: str) -> None:
        self._place = place
        self._namespace = namespace
        self._read: dict[tuple[str, int], Marker] = {}

    def take(self, table: str, since_ns: int = 0) -> Snapshot:
        """Return what counts now, of the hours since a wall time.

        Raises PartialInputError where a marker is damaged or missing: then nobody can know.
        """
        first = hour_of(since_ns) if since_ns else ""
        folder = f"{self._namespace}/{table}"
        for _ in range(_LISTINGS):
            entries = self._place.list(folder, first)
            listed = self._place.list(f"{self._namespace}/{MARKERS}/{table}", first)
            try:
                markers = [marker for entry in listed if (marker := self._marker(entry))]
            except FileNotFoundError:  # an hour went for good meanwhile
                continue
            if not (gap := _gap(markers)):
                found = [StoredFile(e.key, e.bytes, e.modified_ns) for e in entries if _is_data(e)]
                visible = count_visible(found, markers, folder)
                return Snapshot(tuple(visible), tuple(found), tuple(markers))
        where = f"{self._place.url}/{self._namespace}, table {table}"
        raise PartialInputError(f"the marker {gap} is missing", where=where)

    def _marker(self, entry: Entry) -> Marker | None:
        match = _MARKER.fullmatch(entry.key.rpartition("/")[2])
        if not match:
            return None
        known = self._read.get((entry.key, entry.modified_ns))
        if known is None:
            known = parse_marker(entry.key, self._place.read(entry.key))
            # By whichever clock is ahead, the writer's or the medium's: a grace is never cut short.
            late_ns = max(known.created_ns, entry.modified_ns)
            known = replace(known, created_ns=late_ns)
            self._read[entry.key, entry.modified_ns] = known
        return known


def parse_marker(key: str, content: pa.Buffer) -> Marker:
    """Return a stored marker. Raises PartialInputError where it is damaged."""
    match = _MARKER.fullmatch(key.rpartition("/")[2])
    try:
        told = json.loads(content.to_pybytes())
        if told.pop("crc32") != _checksum(told):
            raise ValueError("its checksum differs")
        marker = Marker(**{**told, "replaces": tuple(told["replaces"])})
        if not match or (marker.hour, marker.generation) != (match["hour"], int(match[2])):
            raise ValueError("it is another hour's")
    except (ValueError, KeyError, TypeError) as error:
        raise PartialInputError(f"damaged marker {key}: {error}") from error
    return marker


def _checksum(told: dict[str, object]) -> int:
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


def _gap(markers: Sequence[Marker]) -> str:
    """Return which marker of an hour is missing, or nothing. A drop needs none before it."""
    hours: defaultdict[str, list[Marker]] = defaultdict(list)
    for marker in markers:
        hours[marker.hour].append(marker)
    for hour, chain in hours.items():
        generations = {marker.generation for marker in chain}
        if not any(marker.dropped for marker in chain):
            for wanted in range(1, max(generations)):
                if wanted not in generations:
                    return f"{hour}.{wanted:06d}"
    return ""


def _is_data(entry: Entry) -> bool:
    return bool(_FILE.fullmatch(entry.key.rpartition("/")[2]))
