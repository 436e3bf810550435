"""What the write-ahead log cannot read: kept beside it for a person to look at, and counted."""

import logging
import os
import secrets
import threading
from pathlib import Path
from typing import NamedTuple

from perfledger.schema.durable_folders import sync_folder

log = logging.getLogger("perfledger.collect")

# Of torn and of damaged ones each. Copies take space on what may be a full disk: beyond these,
# bytes are only counted.
MAX_FILES = 64
MAX_BYTES = 1 << 28
_COPY_BYTES = 1 << 20
_UNFINISHED = ".copying"


class Damage(NamedTuple):
    """Bytes of a file that hold no record. `is_torn`: no record follows them.

    That is what a crash in the middle of an append leaves, of which nothing was acknowledged.
    """

    start: int
    end: int
    is_torn: bool

    @property
    def bytes(self) -> int:
        """Return how many they are."""
        return self.end - self.start

    @property
    def suffix(self) -> str:
        """Return what the name of a file with them ends in."""
        return ".torn" if self.is_torn else ".damaged"


class Quarantine:
    """The folder `quarantine` of a log, made when it is first needed. Never raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._bytes = 0
        self._torn_bytes = 0
        # Segments are read again after a failed write: how far each file's damage is counted.
        self._counted_to: dict[Path, int] = {}

    @property
    def bytes(self) -> int:
        """Return how many bytes were taken out of the log, kept or not."""
        return self._bytes

    @property
    def torn_bytes(self) -> int:
        """Return how many of them no record followed: appends that a crash cut short."""
        return self._torn_bytes

    def move(self, path: Path, reason: str, *, is_torn: bool = False) -> None:
        """Take a whole file out of the log: a rename, which needs no space."""
        with self._lock:
            try:
                damage = Damage(0, path.lstat().st_size, is_torn)
                self._count(damage)
                fate = self._move(path, damage)
            except OSError as error:
                fate = f"it could not be moved: {error}"
        log.warning("log file %s: %s; %s", path, reason, fate)

    def copy(self, path: Path, damage: Damage) -> None:
        """Keep a damaged part of a file. The second time, nothing is copied or counted again."""
        with self._lock:
            if damage.start < self._counted_to.get(path, 0):
                return
            self._counted_to[path] = damage.end
            self._count(damage)
            try:
                fate = self._copy(path, damage)
            except OSError as error:
                fate = f"they could not be kept: {error}"
        kind = "cut short" if damage.is_torn else "damaged"
        log.warning(
            "log file %s: %d bytes at %d are %s; %s", path, damage.bytes, damage.start, kind, fate
        )

    def keep(self, name: str, content: memoryview) -> None:
        """Keep a record that is whole and that nobody can read any more."""
        with self._lock:
            self._bytes += content.nbytes
            target = self._folder / f"{name}.unreadable"
            try:
                self._make_folder()
                fate = f"not kept, {self._folder} is full"
                if self._has_room(target, content.nbytes):
                    target.write_bytes(content)
                    fate = f"kept as {target}"
            except OSError as error:
                fate = f"it could not be kept: {error}"
        log.warning("a record of %s cannot be read; %s", name, fate)

    def _count(self, damage: Damage) -> None:
        self._bytes += damage.bytes
        self._torn_bytes += damage.bytes if damage.is_torn else 0

    def _move(self, path: Path, damage: Damage) -> str:
        """Rename a file into the folder and return what was done. Raises OSError."""
        self._make_folder()
        target = self._folder / f"{path.name}-0{damage.suffix}"
        if target.exists():
            target = self._folder / f"{path.name}-{secrets.token_hex(4)}{damage.suffix}"
        # A collector that crashes again and again must not leave ever more files.
        if damage.is_torn and not self._has_room(target, 0):
            path.unlink()
            return f"deleted, {self._folder} is full"
        os.rename(path, target)
        sync_folder(self._folder)
        sync_folder(path.parent)
        return f"moved to {target}"

    def _copy(self, path: Path, damage: Damage) -> str:
        """Copy, sync, rename, sync the folder: what has its name is whole. Raises OSError."""
        self._make_folder()
        target = self._folder / f"{path.stem}-{damage.start}{damage.suffix}"
        if not self._has_room(target, damage.bytes):
            return f"not kept, {self._folder} is full"
        scratch = target.with_name(target.name + _UNFINISHED)
        try:
            _copy_range(path, scratch, damage)
            os.rename(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)
        sync_folder(self._folder)
        return f"kept as {target}"

    def _has_room(self, target: Path, more_bytes: int) -> bool:
        alike = [path for path in self._folder.glob(f"*{target.suffix}") if path != target]
        kept_bytes = sum(path.lstat().st_size for path in alike)
        return len(alike) < MAX_FILES and kept_bytes + more_bytes <= MAX_BYTES

    def _make_folder(self) -> None:
        if not self._folder.exists():
            self._folder.mkdir(parents=True)
            sync_folder(self._folder.parent)


def _copy_range(path: Path, target: Path, damage: Damage) -> None:
    with open(path, "rb") as source, open(target, "wb") as sink:
        source.seek(damage.start)
        left = damage.bytes
        while left and (chunk := source.read(min(left, _COPY_BYTES))):
            sink.write(chunk)
            left -= len(chunk)
        sink.flush()
        os.fsync(sink.fileno())
