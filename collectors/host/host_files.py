"""Files of /proc and /sys below a root; a recorded tree stands in for a machine."""

import os
from collections.abc import Iterable
from pathlib import Path

LARGEST_FILE_BYTES = 4_000_000
_CHUNK_BYTES = 65_536
# Files of this machine's kernel that stay open between samples: opening costs more than reading.
_KEPT_FOLDERS = ("proc/", "sys/fs/cgroup/")
_MOST_KEPT = 64


class HostFiles:
    """Reads files below a root. Files under /proc stay open: their kernel text is made anew."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._prefix = f"{root}/"
        self._open: dict[str, int] = {}
        self._missing: dict[str, tuple[int | None, str | None]] = {}

    def look_again(self) -> None:
        """Look for files that were not there so far the next time that they are asked for."""
        self._missing.clear()

    def text(self, path: str) -> str:
        """Return a file's text; `path` is relative to the root. Raises OSError."""
        if path in self._open:
            return self._kept_text(path)
        file = self._opened(path)
        if path.startswith(_KEPT_FOLDERS) and len(self._open) < _MOST_KEPT:
            self._open[path] = file
            return self._kept_text(path)
        try:
            return _text_of(file)
        finally:
            os.close(file)

    def _opened(self, path: str) -> int:
        if path in self._missing:
            raise OSError(*self._missing[path])
        try:
            return os.open(self._prefix + path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            self._missing[path] = (error.errno, error.strerror)
            raise

    def _kept_text(self, path: str) -> str:
        try:
            return _text_of(self._open[path])
        except OSError:  # the device or the group has gone
            os.close(self._open.pop(path))
            raise

    def text_or_none(self, path: str) -> str | None:
        """Return a file's text, or None where it cannot be read."""
        try:
            return self.text(path)
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted. Raises OSError."""
        return sorted(os.listdir(self.root / folder))

    def texts(self, folder: str, prefix: str, inside: str) -> dict[str, str]:
        """Return `FOLDER/NAME/INSIDE` by NAME, a prefix and a number; unreadable ones are absent.

        Raises OSError where there is no such folder.
        """
        names = [name for name in self.names(folder) if name[len(prefix) :].isdigit()]
        return self.present(
            (name, f"{folder}/{name}/{inside}") for name in names if name.startswith(prefix)
        )

    def present(self, paths: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return the texts of those of the named paths that can be read, by name."""
        texts = ((name, self.text_or_none(path)) for name, path in paths)
        return {name: text for name, text in texts if text is not None}

    def close(self) -> None:
        """Close what stayed open."""
        while self._open:
            os.close(self._open.popitem()[1])


def _text_of(file: int) -> str:
    parts, offset = [], 0
    while part := os.pread(file, _CHUNK_BYTES, offset):
        parts.append(part)
        offset += len(part)
        if offset > LARGEST_FILE_BYTES:
            break
    return b"".join(parts).decode("utf-8", "replace")
