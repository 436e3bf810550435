"""Where in a store's files a trace is: the files' own sorted id columns, kept in memory.

Each file spans the whole range of ids, so statistics prune nothing. The id column of a file is
an index already, sorted and small (2 B a span); read once, it stays here as the first half of each
trace's id and the trace's first row. Nothing else is stored, so nothing can be lost or go stale.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from perfledger.schema.store_files import high_words

MAX_BYTES = 256 << 20  # about 170 M spans in traces of eight
Words = np.ndarray[tuple[int], np.dtype[np.uint64]]
Rows = np.ndarray[tuple[int], np.dtype[np.uint32]]


@dataclass(frozen=True)
class FileIndex:
    """The traces of one file: first halves of their ids, ascending, and where each begins."""

    words: Words
    first_rows: Rows

    @classmethod
    def of(cls, trace_ids: pa.ChunkedArray) -> Self:
        """Index a sorted column of 16-byte ids."""
        words = high_words(trace_ids)
        begins = np.flatnonzero(np.concatenate([[True], words[1:] != words[:-1]])[: len(words)])
        rows = np.append(begins, len(words)).astype(np.uint32)
        return cls(words[begins], rows)

    @property
    def size_bytes(self) -> int:
        """Return the memory it takes."""
        return self.words.nbytes + self.first_rows.nbytes

    def find(self, trace_id: bytes) -> tuple[int, int] | None:
        """Return the first row of a trace's rows and how many there may be."""
        word = np.uint64(int.from_bytes(trace_id[:8], "big"))
        at = int(np.searchsorted(self.words, word))
        if at == len(self.words) or self.words[at] != word:
            return None
        first = int(self.first_rows[at])
        return first, int(self.first_rows[at + 1]) - first


class TraceIndex:
    """The indexes of the files last asked for, within a bound of memory. Thread-safe."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._files: OrderedDict[str, FileIndex] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, key: str, open_file: Callable[[], pa.NativeFile]) -> FileIndex:
        """Return the index of a file, which is read if it is not known (files never change)."""
        with self._lock:
            if known := self._files.get(key):
                self._files.move_to_end(key)
                return known
        with open_file() as source, pq.ParquetFile(source) as file:
            made = FileIndex.of(file.read(columns=["trace_id"], use_threads=False)["trace_id"])
        self._keep(key, made)
        return made

    def _keep(self, key: str, made: FileIndex) -> None:
        with self._lock:
            if key not in self._files:
                self._files[key] = made
                self._bytes += made.size_bytes
            while self._bytes > self._max_bytes and len(self._files) > 1:
                self._bytes -= self._files.popitem(last=False)[1].size_bytes
