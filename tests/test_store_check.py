"""verify: whatever is done to a file is found, and nothing is found in a store as it should be."""

import os
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from perfledger.collectors.upkeep.compaction import CompactionLimits, compact
from perfledger.collectors.upkeep.store_check import check_store
from perfledger.collectors.wal.write_ahead_log import LogRecord, WriteAheadLog
from perfledger.schema.store import Store
from perfledger.schema.store_files import as_declared
from perfledger.schema.tables import POINTS, SPANS

AT_ONCE = CompactionLimits(min_age_s=0, unfinished_files=2, lease_s=0, grace_s=0)


def rows(count: int, seed: int = 0, **changes: object) -> list[dict[str, object]]:
    draw = random.Random(seed)
    times = {"start_ns": 5, "end_ns": 9, "received_ns": 1}
    return [
        {
            "trace_id": draw.randbytes(16),
            "span_id": draw.randbytes(8),
            "name": f"span-{draw.randrange(9)}",
            "kind": "server",
            "attributes": [{"key": "a", "double": draw.random()}],
            **times,
            **changes,
        }
        for _ in range(count)
    ]


def write(store: Store, spans: Sequence[dict[str, object]]) -> Path:
    return store.write("spans", SPANS.from_rows(spans))


def problems(store: Store) -> list[tuple[str, str]]:
    return [(Path(one.where).name, one.what) for one in check_store(store).problems]


def test_a_store_as_it_should_be(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert check_store(store).problems == []
    same = rows(1)[0]
    write(store, [same, {**same, "received_ns": 2}, {**same, "name": "other"}, *rows(100_000, 1)])
    write(store, rows(10, 2)), write(store, rows(10, 3))
    store.write("points", POINTS.from_rows([{"name": "x", "time_ns": 1, "received_ns": 1}]))
    compact(store, CompactionLimits(min_age_s=0, unfinished_files=2, lease_s=0))
    seen: list[None] = []
    check = check_store(store, advance=lambda: seen.append(None))
    assert check.problems == [] or [one.what for one in check.problems] == [
        "1 nulls in received_ns"
    ]
    assert {name: check.counts[name] for name in ("files", "rows", "markers", "files_unseen")} == {
        "files": 2,
        "rows": 100_023,
        "markers": 1,
        "files_unseen": 3,
    }
    assert check.counts["ids_in_conflict"] == 1
    assert len(seen) == 2


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    store, draw = Store(tmp_path), random.Random(7)
    path = write(store, rows(300))
    content = path.read_bytes()
    for _ in range(150):
        harmed = bytearray(content)
        harmed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(harmed)
        check = check_store(store)
        if not check.counts["files_without_checksum"]:  # else the bit was in its very name
            assert [one.where for one in check.problems] == [str(path)]
    path.write_bytes(content)
    assert problems(store) == []
    assert check_store(store).counts["files_without_checksum"] == 0


@pytest.mark.parametrize("kept", [0, 3, 11, 0.5, 0.99])
def test_a_file_that_was_cut_off(tmp_path: Path, kept: float) -> None:
    store = Store(tmp_path)
    write(store, rows(5))
    path = write(store, rows(100))
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
    assert [name for name, _ in problems(store)] == [path.name]


def test_rows_that_should_not_be(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = write(store, rows(2))
    table = as_declared(pq.read_table(path, partitioning=None), SPANS)
    at = table.column_names.index("name")
    loose = pa.schema([field.with_nullable(True) for field in table.schema])
    harms = {
        "row 1 is out of order": table.take([1, 0]),
        "1 nulls in name": table.cast(loose).set_column(at, "name", pa.array([None, "x"])),
        "2 nulls in name": table.drop_columns(["name"]),
        "column name is list<element: int64>, not string": table.set_column(
            at, "name", pa.array([[1], [2]])
        ),
    }
    for what, harmed in harms.items():
        pq.write_table(harmed, path)
        assert problems(store) == [(path.name, what)]


def test_order_is_checked_from_batch_to_batch(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = write(store, rows(1))
    table = SPANS.from_rows(rows(140_000)).sort_by("trace_id")
    pq.write_table(table, path)
    assert problems(store) == []
    swapped = pa.concat_tables(
        [table.slice(0, 65_535), table.slice(65_536), table.slice(65_535, 1)]
    )
    pq.write_table(swapped, path)
    assert problems(store) == [(path.name, "row 139999 is out of order")]
    pq.write_table(pa.concat_tables([table.slice(65_536), table.slice(0, 65_536)]), path)
    assert problems(store) == [(path.name, f"row {140_000 - 65_536} is out of order")]


def test_a_file_in_another_hour(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = write(store, rows(1))
    moved = path.parent.with_name("2020-01-01T00") / path.name
    moved.parent.mkdir()
    path.rename(moved)
    (problem,) = problems(store)
    assert problem[0] == path.name and "another hour" in problem[1]


def test_a_merged_file_that_is_gone_and_a_damaged_marker(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write(store, rows(1)), write(store, rows(1, 1))
    compact(store, AT_ONCE)
    (merged,) = store.files("spans")
    content = merged.read_bytes()
    merged.unlink()
    assert problems(store) == [(merged.name, "it is not there, but its marker is")]
    merged.write_bytes(content)
    assert problems(store) == []
    (marker,) = tmp_path.glob("default/markers/spans/*.json")
    marker.write_text("{}")
    (problem,) = check_store(Store(tmp_path)).problems
    assert marker.name in problem.what


def test_a_merged_file_whose_marker_is_missing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write(store, rows(1)), write(store, rows(1, 1))
    compact(store, CompactionLimits(min_age_s=0, unfinished_files=2, lease_s=0))
    (merged,) = store.files("spans")
    (marker,) = tmp_path.glob("default/markers/spans/*.json")
    content = marker.read_bytes()
    marker.unlink()
    assert problems(store) == []  # a compactor may be about to create it
    assert check_store(store).counts["files_unseen"] == 1
    long_ago_s = time.time() - 3600
    os.utime(merged, (long_ago_s, long_ago_s))
    what = "its marker is missing; its rows count from the files it replaces"
    assert problems(store) == [(merged.name, what)]
    marker.write_bytes(content)
    compact(store, AT_ONCE)
    assert problems(store) == []
    marker.unlink()
    os.utime(merged)
    what = "its marker is missing, and its rows do not count: put it back from a copy"
    assert problems(store) == [(merged.name, what)]


def test_the_write_ahead_log_is_read_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    log = WriteAheadLog.open(folder)
    for number in range(3):
        log.append([LogRecord(0, time.time_ns(), bytes([number]) * 500)])
    log.close()
    check = check_store(Store(tmp_path / "store"), log_folder=folder)
    assert (check.problems, check.counts["log_records"]) == ([], 3)
    (path,) = (one for one in folder.iterdir() if one.stat().st_size > 1000)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    before = sorted(folder.rglob("*"))
    check = check_store(Store(tmp_path / "store"), log_folder=folder)
    assert [one.where for one in check.problems] == [str(path)]
    assert check.counts["log_records"] == 2
    assert sorted(folder.rglob("*")) == before
