"""The store's disk or bucket: bytes a second to and from it, and what one durable write takes.

Nothing is left behind: the file has no name, and objects are deleted.
"""

import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

from perfledger.schema.ceilings import Absent, Ceiling, size_text
from perfledger.schema.store_places import LocalPlace, Place

MIB = 1 << 20
FILE_BYTES, QUICK_FILE_BYTES = 64 * MIB, 8 * MIB
OBJECT_BYTES, QUICK_OBJECT_BYTES = 8 * MIB, MIB
BUFFER_BYTES, SMALL_BYTES = MIB, 4096
FILES, SYNCS, OBJECTS = 5, 20, 5
DIRECT = "past the page cache (O_DIRECT)"
DROPPED = "the page cache was told to drop the file (posix_fadvise)"
FOLDER = "the store is a folder"
Advance = Callable[[], None]
Found = Iterator[Ceiling | Absent]


def storage_steps() -> int:
    """Return how often `measure_storage` calls `advance`."""
    return 2


def measure_storage(place: Place, advance: Advance, *, quick: bool) -> Found:
    """Yield the ceilings of the place where the store is, or why they are absent."""
    folder = place.root if isinstance(place, LocalPlace) else Path(tempfile.gettempdir())
    try:
        yield from _file(folder, QUICK_FILE_BYTES if quick else FILE_BYTES)
    except OSError as error:
        yield Absent("storage_local", "read", f"{error.strerror or error}")
    advance()
    if isinstance(place, LocalPlace):
        yield Absent("storage_object", "put", FOLDER)
        yield Absent("storage_object", "get", FOLDER)
    else:
        try:
            yield from _objects(place, QUICK_OBJECT_BYTES if quick else OBJECT_BYTES)
        except OSError as error:
            yield Absent("storage_object", "put", f"{error}")
    advance()


def _file(folder: Path, size: int) -> Found:
    """Write a file and sync it, read it past the page cache, sync small writes."""
    writes, reads, syncs, how = [], [], [], DIRECT
    with tempfile.TemporaryFile(dir=_existing(folder), buffering=0) as file:
        content = os.urandom(BUFFER_BYTES)
        for _ in range(FILES):
            writes.append(size / _seconds(lambda: _write(file.fileno(), content, size)))
        for _ in range(FILES):
            seconds, how = _read(file.fileno(), size)
            reads.append(size / seconds)
        small = content[:SMALL_BYTES]
        for _ in range(SYNCS):
            syncs.append(1e9 * _seconds(lambda: _write(file.fileno(), small, SMALL_BYTES)))
    variant = size_text(size)
    yield Ceiling.best("storage_local", "write", variant, "bytes/s", writes, "with fsync")
    yield Ceiling.best("storage_local", "read", variant, "bytes/s", reads, how)
    small_size = size_text(SMALL_BYTES)
    yield Ceiling.best("storage_local", "fsync", small_size, "ns", syncs, "one write and fsync")


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above that is there."""
    return next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())


def _write(descriptor: int, content: bytes, size: int) -> None:
    for at in range(0, size, len(content)):
        os.pwrite(descriptor, content, at)
    os.fsync(descriptor)


def _read(descriptor: int, size: int) -> tuple[float, str]:
    """Return the seconds of reading a file once, and how its cached pages were avoided."""
    path = f"/proc/self/fd/{descriptor}"
    with mmap.mmap(-1, BUFFER_BYTES) as buffer:  # page-aligned, as O_DIRECT needs it
        try:
            direct = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except (OSError, AttributeError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return _seconds(lambda: _read_all(descriptor, buffer, size)), DROPPED
        try:
            return _seconds(lambda: _read_all(direct, buffer, size)), DIRECT
        finally:
            os.close(direct)


def _read_all(descriptor: int, buffer: mmap.mmap, size: int) -> None:
    for at in range(0, size, BUFFER_BYTES):
        os.preadv(descriptor, [buffer], at)


def _objects(place: Place, size: int) -> Found:
    """Put, get and delete objects of random bytes."""
    content = pa.py_buffer(os.urandom(size))
    puts, gets = [], []
    for _ in range(OBJECTS):
        key = f"ceilings-{secrets.token_hex(8)}/object"
        try:
            puts.append(size / _seconds(lambda: place.create(key, content)))  # noqa: B023
            gets.append(size / _seconds(lambda: place.read(key)))  # noqa: B023
        finally:
            place.delete(key)
    variant = size_text(size)
    yield Ceiling.best("storage_object", "put", variant, "bytes/s", puts, "one connection")
    yield Ceiling.best("storage_object", "get", variant, "bytes/s", gets, "one connection")


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
