"""How far counters grew over a window: restarts, new starts, edges, and what is not enough."""

from pathlib import Path

import polars as pl
import pytest
from ledger_rows import BASE, BOOT, MS, Row, fill, point

from perfledger.analyzers import Selection
from perfledger.analyzers.counter_growth import growth, last_values, points_of
from perfledger.schema.store import Store

WINDOW = (BASE, BASE + 10 * MS)
KEYS = ("system.device",)


def points(folder: Path, *rows: Row) -> pl.DataFrame:
    store = fill(Store(folder), points=rows)
    return points_of(Selection(store), ["system.disk.io_time"], KEYS, WINDOW)


def read(at: float, value: float, device: str = "vda", **changed: object) -> Row:
    row = point("system.disk.io_time", at, value, system__device=device)
    return row | changed


def grown(found: pl.DataFrame) -> list[tuple[object, ...]]:
    rows = growth(found, ["system.device"], WINDOW)
    rows = rows.with_columns(pl.col("from_ns", "to_ns") - BASE)
    return rows.select("system.device", "growth", "from_ns", "to_ns").rows()


def test_from_the_last_read_before_the_window_to_the_first_after_it(tmp_path: Path) -> None:
    reads = [read(at, value) for at, value in ((-9, 1), (-1, 2), (5, 7), (11, 12), (19, 99))]
    assert grown(points(tmp_path, *reads)) == [("vda", 10.0, -MS, 11 * MS)]


def test_a_counter_that_fell_was_started_again(tmp_path: Path) -> None:
    reads = [read(at, value) for at, value in ((0, 100), (4, 130), (6, 5), (10, 25))]
    assert grown(points(tmp_path, *reads)) == [("vda", 55.0, 0, 10 * MS)]


def test_over_a_new_start_time_nothing_is_subtracted(tmp_path: Path) -> None:
    reads = [read(0, 100), read(4, 130), read(6, 500, start_ns=BASE + 5 * MS)]
    reads += [read(10, 510, start_ns=BASE + 5 * MS)]
    assert grown(points(tmp_path, *reads)) == [("vda", 40.0, 0, 10 * MS)]


def test_series_are_apart_and_one_read_tells_nothing(tmp_path: Path) -> None:
    reads = [read(0, 1), read(10, 2), read(1, 5, "vdb"), read(9, 8, "vdb"), read(5, 1, "vdc")]
    assert grown(points(tmp_path, *reads)) == [
        ("vda", 1.0, 0, 10 * MS),
        ("vdb", 3.0, MS, 9 * MS),
    ]


def test_what_is_far_from_the_window_is_not_read(tmp_path: Path) -> None:
    found = points(tmp_path, read(-3_600_000, 1), read(5, 2), read(7, 3))
    assert found["time_ns"].to_list() == [BASE + 5 * MS, BASE + 7 * MS]
    assert found["boot_id"].to_list() == [BOOT, BOOT]


def test_the_newest_value_of_a_gauge(tmp_path: Path) -> None:
    found = points(tmp_path, read(0, 1), read(9, 4), read(5, 7), read(5, 7, "vdb"))
    assert sorted(last_values(found, ["system.device"]).rows()) == [("vda", 4.0), ("vdb", 7.0)]


@pytest.mark.parametrize("rows", [[], [read(5, 1)]])
def test_no_growth_is_no_row(tmp_path: Path, rows: list[Row]) -> None:
    assert grown(points(tmp_path, *rows)) == []
