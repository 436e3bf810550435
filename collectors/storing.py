"""Segments into files: one table a signal, sorted, without what came before; then the log may go.

The files of a segment carry its name, so that writing them twice is writing them once: after a
crash between file and log the same segment is read again and finds its files there.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa

from perfledger.collectors.item_counts import ItemCounts
from perfledger.collectors.segments import OpenSegment
from perfledger.collectors.wal.write_ahead_log import Segment, WriteAheadLog
from perfledger.collectors.wire.assemble import in_order, spans_table
from perfledger.collectors.wire.columns import Columns
from perfledger.collectors.wire.recent_spans import Hashes, RecentSpans
from perfledger.schema.store import Store
from perfledger.schema.tables import SPANS

log = logging.getLogger("perfledger.collect")


class Sampler(Protocol):
    """Decides which traces are kept, once more of them has been seen."""

    def observe(self, spans: pa.Table) -> None:
        """Take note of spans that are to be decided on later."""

    def keep(self, spans: pa.Table) -> tuple[pa.Table, int]:
        """Return what is kept of spans observed before, and how many are not."""


@dataclass
class Prepared:
    """A segment as tables; what has been written of it already is not written again."""

    log: Segment
    opened_s: float
    tables: dict[str, pa.Table]
    items: Counter[str]
    hashes: Hashes
    bytes: int
    sampled: bool = False
    written: set[str] = field(default_factory=set)


class Storing:
    """`prepare` segments in the order of the log, then `store` them. One thread at a time."""

    def __init__(
        self,
        store: Store,
        wal: WriteAheadLog,
        recent: RecentSpans,
        counts: ItemCounts,
        observe: Callable[[pa.Table], None],
        sampler: Sampler | None = None,
        sample_after_s: float = 0.0,
    ) -> None:
        """`observe` is handed the spans that are new, before any are sampled away."""
        self._store = store
        self._wal = wal
        self._recent = recent
        self._observe = observe
        self._sampler = sampler
        self.wait_s = sample_after_s if sampler is not None else 0.0
        self._counts = counts

    def prepare(self, segment: Segment, opened: OpenSegment) -> tuple[Prepared, Columns]:
        """Return a segment as tables, and its columns, which are free again."""
        tables = {name: pa.concat_tables(parts) for name, parts in opened.tables.items() if parts}
        is_new, hashes = self._recent.take_new(opened.spans)
        items = opened.items.copy()
        items["spans"] = int(is_new.sum())
        if items["spans"]:
            order = in_order(opened.spans)
            spans = spans_table(opened.spans, order[is_new[order]])
            tables["spans"] = spans
            self._observe(spans)
            if self._sampler is not None:
                self._sampler.observe(spans)
        size = sum(table.nbytes for table in tables.values())
        # Only the new ones: what else is here is an older segment's, which may not be stored yet.
        hashes = np.ascontiguousarray(hashes[:, is_new])
        prepared = Prepared(segment, opened.opened_s, tables, items, hashes, size)
        self._counts.became("spans", "deduplicated", opened.spans.rows - items["spans"])
        return prepared, opened.spans.columns

    def is_due(self, prepared: Prepared) -> bool:
        """Return whether a segment need not wait any more."""
        return time.monotonic() - prepared.opened_s >= self.wait_s

    def store(self, prepared: Prepared) -> None:
        """Write what is not written yet, and let the log go.

        Raises OSError where the disk refuses; call it again later then.
        """
        self._sample(prepared)
        for name, table in prepared.tables.items():
            if name in prepared.written:
                continue
            if table.num_rows:
                self._store.write(
                    name, table, name=str(prepared.log.name), is_sorted=name == SPANS.name
                )
            prepared.written.add(name)
            self._counts.became(name, "written", prepared.items[name])
        self._remember(prepared)
        self._wal.drop(prepared.log)

    def _remember(self, prepared: Prepared) -> None:
        """Keep the hashes for a restart, once, where the disk lets us: the reader needs none."""
        hashes, prepared.hashes = prepared.hashes, prepared.hashes[:, :0]
        if not hashes.shape[1]:
            return
        try:
            self._recent.remember(str(prepared.log.name), hashes)
        except OSError as error:
            self._counts.add({"write_failures": 1})
            log.error("cannot keep which spans came lately: %s", error.strerror)

    def _sample(self, prepared: Prepared) -> None:
        spans = prepared.tables.get("spans")
        if self._sampler is None or spans is None or prepared.sampled:
            return
        kept, dropped = self._sampler.keep(spans)
        prepared.sampled = True
        prepared.tables["spans"] = kept
        prepared.items["spans"] -= dropped
        self._counts.became("spans", "sampled_away", dropped)
