"""Telemetry between its log and its files: what one segment of the log holds, in memory."""

import time
from collections import Counter
from dataclasses import dataclass

import pyarrow as pa

from perfledger.collectors.attribute_values import Tally
from perfledger.collectors.otlp_rows import (
    SIGNALS,
    TRACES,
    Signal,
    decode_messages,
    undecodable_request,
)
from perfledger.collectors.wire.columns import Columns
from perfledger.collectors.wire.span_batch import Malformed, Mark, SpanBatch, SpanReader

# What a request of metrics or logs takes beside its rows' bytes.
_OVERHEAD_BYTES = 20_000


@dataclass(frozen=True)
class Taken:
    """One request as it went in: its bytes without content, and what was found in it."""

    signal: Signal
    kept: memoryview
    tally: Tally

    @property
    def items(self) -> int:
        """Return how many spans, points or records were accepted."""
        return self.tally.items - self.tally.rejected.total()


@dataclass(frozen=True)
class _Mark:
    spans: Mark
    tables: dict[str, int]
    items: Counter[str]
    table_bytes: int


class OpenSegment:
    """Takes requests until it is cut; one thread at a time."""

    def __init__(self, reader: SpanReader, columns: Columns | None = None) -> None:
        self.spans = SpanBatch(reader, columns=columns)
        self.tables: dict[str, list[pa.Table]] = {s.table: [] for s in SIGNALS if s is not TRACES}
        self.items: Counter[str] = Counter()
        self.opened_s = time.monotonic()
        self._table_bytes = 0
        # About how much memory this takes; others read it at any time.
        self.held_bytes = 0

    def add(self, signal: Signal, body: bytes, received_ns: int) -> Taken:
        """Take a request. Raises UndecodableRequest, and then nothing has been added."""
        if signal is TRACES:
            try:
                kept, tally = self.spans.add(body, received_ns)
            except Malformed as error:
                raise undecodable_request(signal, error.why) from None
            taken = Taken(signal, kept, tally)
        else:
            decoded = decode_messages(signal, body, received_ns, self.spans.reader.limit_bytes)
            if decoded.rows.num_rows:
                self.tables[signal.table].append(decoded.rows)
                self._table_bytes += decoded.rows.nbytes + _OVERHEAD_BYTES
            taken = Taken(signal, memoryview(decoded.kept), decoded.tally)
        self.items[signal.table] += taken.items
        self.held_bytes = self.spans.held_bytes + self._table_bytes
        return taken

    def mark(self) -> _Mark:
        """Return where the segment ends now, for `take_back`."""
        lengths = {name: len(parts) for name, parts in self.tables.items()}
        return _Mark(self.spans.mark(), lengths, self.items.copy(), self._table_bytes)

    def take_back(self, mark: _Mark) -> None:
        """Forget what was added since a mark."""
        self.spans.take_back(mark.spans)
        for name, length in mark.tables.items():
            del self.tables[name][length:]
        self.items, self._table_bytes = mark.items.copy(), mark.table_bytes
        self.held_bytes = self.spans.held_bytes + self._table_bytes
