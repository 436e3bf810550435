"""Rows wait in memory until they are files, and stay there while they cannot be."""

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from perfledger.collectors.buffering import RowBuffer
from perfledger.schema.store import Store
from perfledger.schema.tables import LOGS, SPANS


def spans(*ids: int) -> pa.Table:
    return SPANS.from_rows(
        {
            "trace_id": bytes(16),
            "span_id": n.to_bytes(8, "big"),
            "name": "work",
            "kind": "internal",
            "start_ns": n,
            "end_ns": n,
            "received_ns": n,
        }
        for n in ids
    )


LOG = LOGS.from_rows([{"time_ns": 1, "received_ns": 1}])


def flush(buffer: RowBuffer) -> None:
    for table in buffer.waiting():
        buffer.flush(table)


def test_rows_are_written_once_they_are_old_or_many(tmp_path: Path) -> None:
    now_s = 0.0
    store = Store(tmp_path)
    buffer = RowBuffer(store.write, flush_bytes=50_000, flush_after_s=1, clock_s=lambda: now_s)
    buffer.add("spans", spans())
    assert (buffer.is_due(), buffer.bytes) == (False, 0)
    buffer.add("spans", spans(1))
    now_s = 0.9
    buffer.add("spans", spans(2, 3))
    assert not buffer.is_due()
    now_s = 1.0
    assert buffer.is_due()
    assert buffer.waiting() == Counter({"spans": 3})
    flush(buffer)
    assert (buffer.is_due(), buffer.bytes, buffer.waiting()) == (False, 0, Counter())
    for n in range(10):
        buffer.add("spans", spans(n))
    assert buffer.is_due()
    flush(buffer)
    assert buffer.written() == Counter({"spans": 13})
    assert len(store.files("spans")) == 2


def test_what_cannot_be_written_stays_and_the_rest_is_not_written_twice(tmp_path: Path) -> None:
    store = Store(tmp_path)
    buffer = RowBuffer(store.write, flush_bytes=10**9, flush_after_s=0)
    buffer.add("logs", LOG)
    buffer.add("spans", spans(1, 2))
    in_the_way = tmp_path / "default" / "spans"
    in_the_way.parent.mkdir()
    in_the_way.write_text("")
    with pytest.raises(OSError):
        flush(buffer)
    assert (buffer.waiting(), buffer.written()) == (Counter(spans=2), Counter(logs=1))
    assert buffer.bytes > 0
    buffer.add("spans", spans(3))
    in_the_way.unlink()
    flush(buffer)
    assert (buffer.waiting(), buffer.written()) == (Counter(), Counter(logs=1, spans=3))
    assert store.scan("spans").collect()["start_ns"].sort().to_list() == [1, 2, 3]
    assert len(store.files("logs")) == 1


def test_rows_that_can_never_be_written_keep_no_other_table_from_the_disk(tmp_path: Path) -> None:
    now_s = 0.0
    store = Store(tmp_path)
    buffer = RowBuffer(store.write, flush_bytes=10**9, flush_after_s=1, clock_s=lambda: now_s)
    buffer.add("requests", LOG)  # not the columns of that table
    buffer.add("spans", spans(1))
    for n, table in ((2, "requests"), (3, "requests")):
        with pytest.raises(KeyError):
            buffer.flush(table)
        buffer.add("spans", spans(n))
        buffer.flush("spans")
    assert (buffer.waiting(), buffer.written()) == (Counter(requests=1), Counter(spans=3))
    assert not buffer.is_due()
    now_s = 1.0
    assert buffer.is_due()
    assert buffer.bytes > 0
