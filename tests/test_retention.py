"""Retention: whole hours go at once, the oldest first, and never what a verdict stands on."""

import json
import time
from pathlib import Path

import pytest

from perfledger.collectors.upkeep.compaction import CompactionLimits, clean, compact
from perfledger.collectors.upkeep.retention import Hour, RetentionRule, cited_runs, drop, plan
from perfledger.schema.store import Store
from perfledger.schema.tables import RUNS, SPANS

HOUR_NS = 3600 * 10**9
NOW_NS = time.time_ns()
AT_ONCE = CompactionLimits(min_age_s=0, unfinished_files=2, lease_s=0, grace_s=0)


def write(store: Store, hours_ago: int, number: int = 0, run: str | None = None) -> Path:
    row = {
        "trace_id": number.to_bytes(16, "big"),
        "span_id": number.to_bytes(8, "big"),
        "name": "chat",
        "kind": "server",
        "start_ns": number,
        "end_ns": number,
        "received_ns": 1,
        "run_id": run,
    }
    name = f"{NOW_NS - hours_ago * HOUR_NS + number}-{number:04x}"
    return store.write("spans", SPANS.from_rows([row]), name=name)


def write_run(store: Store, run_id: str, verdict: object, manifest: object = None) -> None:
    row = {"run_id": run_id, "kind": "rerun", "created_ns": 1, "received_ns": 1}
    told = {"verdict": json.dumps(verdict) if verdict else None, "manifest": json.dumps(manifest)}
    name = f"{NOW_NS - 90 * HOUR_NS}-{run_id}"
    store.write("runs", RUNS.from_rows([{**row, **told}]), name=name)


def numbers(store: Store) -> list[int]:
    return sorted(store.scan("spans").collect()["start_ns"])


def days(hours: list[Hour]) -> list[tuple[str, str]]:
    return [(hour.table, hour.kept_because) for hour in hours]


def test_old_hours_go_at_once_and_their_files_later(tmp_path: Path) -> None:
    store = Store(tmp_path)
    paths = [write(store, hours_ago, hours_ago) for hours_ago in (0, 1, 5, 6)]
    late = write(store, 5, 77)
    over = plan(store, RetentionRule(max_age_s=3 * 3600))
    assert [(one.files, one.hour) for one in over] == [
        (1, paths[3].parent.name),
        (2, paths[2].parent.name),
    ]
    assert numbers(store) == [0, 1, 5, 6, 77]
    assert drop(store, over) == over
    assert numbers(store) == [0, 1]
    assert all(path.exists() for path in (*paths, late))
    assert clean(store).counts == {}
    assert clean(store, AT_ONCE).counts == {"files_deleted": 3}
    assert [path.exists() for path in (*paths, late)] == [True, True, False, False, False]
    assert plan(store, RetentionRule(max_age_s=3 * 3600)) == []
    write(store, 5, 78)  # replayed from a log: too late, and deleted again
    assert numbers(store) == [0, 1]
    assert clean(store, AT_ONCE).counts == {"files_deleted": 1}


def test_by_size_the_oldest_go_until_the_rest_fits_and_this_hour_stays(tmp_path: Path) -> None:
    store = Store(tmp_path)
    sizes = [write(store, hours_ago, hours_ago).stat().st_size for hours_ago in (0, 2, 3, 4)]
    over = plan(store, RetentionRule(max_bytes=sizes[0] + sizes[1] + 10))
    assert len(over) == 2
    assert len(plan(store, RetentionRule(max_bytes=1))) == 3
    drop(store, plan(store, RetentionRule(max_bytes=1)))
    assert numbers(store) == [0]


def test_runs_that_a_verdict_cites_stay(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number, run in enumerate(("a", "b", "c", None)):
        write(store, 10 + number, number, run)
    write_run(store, "a", None), write_run(store, "c", None)
    write_run(store, "verdict", {"outcome": "supported"}, {"pairs": [{"runs": ["b", "x"]}]})
    assert {"verdict", "b"} <= cited_runs(store)
    over = plan(store, RetentionRule(max_age_s=3600))
    assert days(over) == [
        ("spans", ""),
        ("spans", ""),
        ("spans", "a verdict cites run b"),
        ("spans", ""),
        ("runs", "a verdict cites run verdict"),
    ]
    drop(store, over)
    assert numbers(store) == [1]
    assert sorted(store.scan("runs").collect()["run_id"]) == ["a", "c", "verdict"]


def test_what_cannot_be_read_stays_while_there_are_verdicts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = write(store, 10, run="a")
    path.write_bytes(path.read_bytes()[:-50] + bytes(50))
    write_run(store, "v", {"outcome": "refuted"})
    (spans, runs) = plan(store, RetentionRule(max_age_s=3600))
    assert spans.kept_because == f"{path.name} cannot be read"
    assert runs.kept_because == "a verdict cites run v"


def test_a_dropped_hour_ends_its_chain_after_a_week(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write(store, 5, 1), write(store, 5, 2)
    compact(store, AT_ONCE)
    drop(store, plan(store, RetentionRule(max_age_s=3600)))
    clean(store, AT_ONCE)
    markers = sorted(tmp_path.glob("default/markers/spans/*"))
    assert len(markers) == 2
    assert not list(tmp_path.glob("default/spans/*/*"))
    clean(store, AT_ONCE, now_ns=lambda: time.time_ns() + 8 * 24 * HOUR_NS)
    assert not list(tmp_path.glob("default/markers/spans/*"))
    assert numbers(store) == []


@pytest.mark.parametrize("dropped_first", [True, False])
def test_dropping_and_compacting_at_once(tmp_path: Path, dropped_first: bool) -> None:
    store = Store(tmp_path)
    write(store, 5, 1), write(store, 5, 2)
    over = plan(store, RetentionRule(max_age_s=3600))
    if dropped_first:
        drop(store, over)
    compact(store, AT_ONCE)
    drop(store, over)
    compact(store, AT_ONCE)
    assert numbers(store) == []
    assert not list(tmp_path.glob("default/spans/*/*.parquet"))
