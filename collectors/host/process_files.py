"""Files of one process below /proc, and what its file descriptors are.

The process's folder is held open: should its id be given to another process, reading fails
instead of telling of that one.
"""

import os
import re
import resource
import struct
from dataclasses import dataclass
from pathlib import Path

from perfledger.collectors.host.thread_state import parse_stat

_MOST_POLLED = 1024
_CHUNK_BYTES = 16_384
_LARGEST_FILE_BYTES = 8_000_000
_POLLED = struct.Struct("=ihh")
_DEVICE = r"(\(unreachable\))?/dev/"
_KINDS = (
    ("socket", re.compile(rf"socket:|{_DEVICE}infiniband/")),
    ("gpu", re.compile(rf"{_DEVICE}(nvidia|dri/|kfd$|dxg$)")),
    ("pipe", re.compile(rf"pipe:|anon_inode:\[?(eventfd|signalfd|pidfd)|{_DEVICE}(pts|tty|ptmx)")),
    ("timer", re.compile(r"anon_inode:\[?timerfd")),
    ("other", re.compile(rf"anon_inode:|{_DEVICE}(?!shm/)")),
    ("disk", re.compile(r"/")),
)


def kind_of(target: str) -> str:
    """Return what a descriptor is from what its link in /proc/PID/fd says."""
    return next((kind for kind, pattern in _KINDS if pattern.match(target)), "other")


@dataclass
class KeptFiles:
    """How many more files may stay open; what several processes share."""

    left: int

    @classmethod
    def quarter(cls) -> "KeptFiles":
        """Return a quarter of the descriptors that this process may have."""
        return cls(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)


class ProcessFiles:
    """Reads the files of one process. All methods raise OSError where it has ended."""

    def __init__(self, proc: Path, pid: int, kept: KeptFiles) -> None:
        """Open the process's folder; keep files of threads open too, as `kept` allows.

        Raises OSError.
        """
        self.pid = pid
        self._schedules: dict[int, int] = {}
        self._kept = kept
        self._folder = os.open(proc / str(pid), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            stat = parse_stat(self.read("stat"))
            if stat.state in "ZX":
                raise ProcessLookupError(3, "the process has ended")
            self.start_ticks = stat.start_ticks
        except (OSError, ValueError):
            self.close()
            raise

    def read(self, path: str) -> bytes:
        """Return a file of the process."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder)
        try:
            whole = os.read(file, _CHUNK_BYTES)
            part = whole if len(whole) > 2048 else b""
            while part and len(whole) < _LARGEST_FILE_BYTES:
                part = os.read(file, _CHUNK_BYTES)
                whole += part
            return whole
        finally:
            os.close(file)

    def schedule(self, tid: int) -> bytes:
        """Return a thread's schedstat. The file stays open, as it is read at every sample."""
        file = self._schedules.get(tid)
        if file is not None:
            return os.pread(file, _CHUNK_BYTES, 0)
        if self._kept.left <= 0:
            return self.read(f"task/{tid}/schedstat")
        self._schedules[tid] = file = self.open(f"task/{tid}/schedstat")
        self._kept.left -= 1
        return os.pread(file, _CHUNK_BYTES, 0)

    def forget(self, tid: int) -> None:
        """Close what is kept open of a thread that has ended."""
        file = self._schedules.pop(tid, None)
        if file is not None:
            os.close(file)
            self._kept.left += 1

    def has(self, path: str) -> bool:
        """Return whether the process has such a file."""
        try:
            os.stat(path, dir_fd=self._folder)
        except OSError:
            return False
        return True

    def threads(self) -> list[int]:
        """Return the ids of its threads."""
        folder = os.open("task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._folder)
        try:
            return [int(name) for name in os.listdir(folder)]
        finally:
            os.close(folder)

    def link(self, path: str) -> str:
        """Return where a link of the process leads."""
        return os.readlink(path, dir_fd=self._folder)

    def open(self, path: str) -> int:
        """Open a file of the process, or one that it sees, as `root/usr/bin/python3`."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder)

    def close(self) -> None:
        """Let go of the process."""
        for tid in list(self._schedules):
            self.forget(tid)
        os.close(self._folder)

    def kind(self, descriptor: int) -> str:
        """Return what a descriptor is; one that is closed meanwhile is other."""
        try:
            return kind_of(self.link(f"fd/{descriptor & 0xFFFFFFFF}"))
        except OSError:
            return "other"

    def in_epoll(self, descriptor: int) -> set[str]:
        """Return what an epoll descriptor watches, from its fdinfo."""
        try:
            text = self.read(f"fdinfo/{descriptor & 0xFFFFFFFF}")
        except OSError:
            return {"other"}
        watched = re.findall(rb"^tfd:\s*(\d+)", text, re.MULTILINE)[:_MOST_POLLED]
        return {self.kind(int(number)) for number in watched}

    def in_poll(self, address: int, count: int) -> set[str]:
        """Return what an array of struct pollfd names, read from the process's memory."""
        count = min(count & 0xFFFFFFFF, _MOST_POLLED)
        if count == 0:
            return set()
        raw = self._memory(address, count * _POLLED.size)
        if raw is None:
            return {"other"}
        descriptors = [number for number, _, _ in _POLLED.iter_unpack(raw) if number >= 0]
        return {self.kind(number) for number in descriptors}

    def in_select(self, bound: int, addresses: tuple[int, ...]) -> set[str]:
        """Return what three bit sets of `bound` bits name, read from the process's memory."""
        size = (min(bound & 0xFFFFFFFF, _MOST_POLLED) + 7) // 8
        kinds: set[str] = set()
        for address in addresses:
            if address == 0 or size == 0:
                continue
            raw = self._memory(address, size)
            if raw is None:
                return {"other"}
            bits = int.from_bytes(raw, "little")
            kinds |= {self.kind(bit) for bit in range(size * 8) if bits >> bit & 1}
        return kinds

    def _memory(self, address: int, size: int) -> bytes | None:
        try:
            file = self.open("mem")
        except OSError:
            return None
        try:
            raw = os.pread(file, size, address)
        except (OSError, OverflowError):
            return None
        finally:
            os.close(file)
        return raw if len(raw) == size else None
