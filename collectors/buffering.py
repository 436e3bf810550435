"""Acknowledged rows in memory, until they are files: flushed by age or by size, never dropped.

This is where a write-ahead log will go; until then what is here is lost if the process is killed.
A write that fails (a full disk) leaves the rows here, until one succeeds. Tables are written each
for itself: what is wrong with the rows of one keeps no other from the disk.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable

import pyarrow as pa

# What an Arrow table of a few rows needs beyond its values, a column.
_OVERHEAD_BYTES = 300


class RowBuffer:
    """Rows per table. `add` and `flush` may be called from different threads."""

    def __init__(
        self,
        write: Callable[[str, pa.Table], object],
        *,
        flush_bytes: int,
        flush_after_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._flush_bytes = flush_bytes
        self._flush_after_s = flush_after_s
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._waiting: dict[str, list[pa.Table]] = {}
        self._bytes = 0
        self._oldest_s: dict[str, float] = {}
        self._written: Counter[str] = Counter()

    def add(self, table: str, rows: pa.Table) -> None:
        """Take rows of a table; they count from now until they are written."""
        if not rows.num_rows:
            return
        with self._lock:
            self._waiting.setdefault(table, []).append(rows)
            self._bytes += _size_bytes(rows)
            self._oldest_s.setdefault(table, self._clock_s())

    @property
    def bytes(self) -> int:
        """Return the memory of the rows that wait or are being written."""
        return self._bytes

    def is_due(self) -> bool:
        """Return whether the rows are old or many enough to be written."""
        with self._lock:
            if not self._oldest_s:
                return False
            oldest_s = min(self._oldest_s.values())
            aged = self._clock_s() - oldest_s >= self._flush_after_s
            return aged or self._bytes >= self._flush_bytes

    def waiting(self) -> Counter[str]:
        """Return how many rows of each table wait."""
        with self._lock:
            return Counter({name: _rows(parts) for name, parts in self._waiting.items()})

    def written(self) -> Counter[str]:
        """Return how many rows of each table are durable."""
        with self._lock:
            return self._written.copy()

    def flush(self, table: str) -> None:
        """Write what waits of a table as one file; `written()` counts the rows that are durable.

        Raises what the write raises, OSError where the disk refuses; the rows stay then.
        """
        with self._lock:
            parts = self._waiting.pop(table, [])
            self._oldest_s.pop(table, None)
        if not parts:
            return
        written = False
        try:
            self._write(table, pa.concat_tables(parts))
            written = True
        finally:
            with self._lock:
                if written:
                    self._bytes -= sum(map(_size_bytes, parts))
                    self._written[table] += _rows(parts)
                else:
                    self._waiting[table] = parts + self._waiting.get(table, [])
                    self._oldest_s[table] = self._clock_s()


def _size_bytes(rows: pa.Table) -> int:
    return int(rows.nbytes + _OVERHEAD_BYTES * rows.num_columns)


def _rows(parts: list[pa.Table]) -> int:
    return int(sum(part.num_rows for part in parts))
