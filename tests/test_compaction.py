"""Compaction: whatever happens to it, a reader sees each row once."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.collectors.upkeep.compaction import CompactionLimits, commit, compact
from perfledger.collectors.upkeep.merging import merge, sent_again
from perfledger.schema.errors import PartialInputError
from perfledger.schema.store import Store
from perfledger.schema.store_files import as_declared
from perfledger.schema.store_snapshot import Marker, hour_of
from perfledger.schema.tables import SPANS

# Files of this very moment are merged at once, and whoever is late must lose by itself.
NOW = CompactionLimits(min_age_s=0, unfinished_files=2, lease_s=0)
AT_ONCE = CompactionLimits(min_age_s=0, unfinished_files=2, lease_s=0, grace_s=0)

COMPACT_FOREVER = """
import sys
from pathlib import Path
from perfledger.collectors.upkeep.compaction import CompactionLimits, compact
from perfledger.schema.store import Store
limits = CompactionLimits(0, 2, max_rows=400, lease_s=0, grace_s=float(sys.argv[2]))
store = Store.at(sys.argv[1])
print("ready", flush=True)
while True:
    compact(store, limits, tables=["spans"])
"""
# Stops itself after its merged file is there and before the marker is.
SLEEP_BEFORE_COMMIT = """
import os, signal, sys
from perfledger.collectors.upkeep import compaction
from perfledger.schema.store import Store
commit = compaction.commit
def slow(*given):
    compaction.commit = commit
    os.kill(os.getpid(), signal.SIGSTOP)
    return commit(*given)
compaction.commit = slow
limits = compaction.CompactionLimits(0, 2, lease_s=0)
print(compaction.compact(Store.at(sys.argv[1]), limits, tables=["spans"]).counts)
"""


def row(number: int, **changes: object) -> dict[str, object]:
    ids = {"trace_id": random.Random(number).randbytes(16), "span_id": number.to_bytes(8, "big")}
    times = {"start_ns": number, "end_ns": number + 1, "received_ns": 1}
    return {**ids, "name": "chat", "kind": "server", **times, **changes}


def write(store: Store, *numbers: int, name: str | None = None) -> Path:
    return store.write("spans", SPANS.from_rows([row(number) for number in numbers]), name=name)


def numbers(store: Store) -> list[int]:
    """Return the rows that a reader sees, those that it sees twice twice."""
    read = store.collect("spans", lambda rows: rows.select("start_ns"), as_received=True)
    return sorted(read["start_ns"].to_list())


@contextmanager
def running(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", code, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


class Reader(threading.Thread):
    """Reads all the while; keeps the first wrong answer. Rows may come, none may go or repeat."""

    def __init__(self, store: Store, least: set[int]) -> None:
        super().__init__()
        self.store, self.least = store, least
        self.wrong: object = None
        self.reads = 0
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.is_set() and not self.wrong:
            least = set(self.least)
            try:
                seen = numbers(self.store)
            except Exception as error:
                self.wrong = error
                raise
            if len(seen) != len(set(seen)) or not least <= set(seen):
                twice = {number for number in seen if seen.count(number) > 1}
                self.wrong = {"twice": twice, "missing": least - set(seen)}
            self.reads += 1


@contextmanager
def reading(store: Store, least: set[int]) -> Iterator[Reader]:
    reader = Reader(store, least)
    reader.start()
    try:
        yield reader
    finally:
        reader.ended.set()
        reader.join()
    assert reader.wrong is None
    assert reader.reads


def test_small_files_become_one_sorted_file(tmp_path: Path) -> None:
    store = Store(tmp_path)
    paths = [write(store, *range(at, at + 10)) for at in range(0, 50, 10)]
    done = compact(store, NOW)
    assert done.counts == {"files_merged": 5, "files_made": 1, "rows": 50, "rows_sent_again": 0}
    (merged,) = store.files("spans")
    assert merged not in paths and all(path.exists() for path in paths)
    trace_ids = pq.read_table(merged, partitioning=None)["trace_id"].to_pylist()
    assert trace_ids == sorted(trace_ids)
    assert numbers(store) == list(range(50))
    assert compact(store, NOW).counts == {}
    again = compact(store, AT_ONCE)
    assert again.counts == {"files_deleted": 5}
    assert not any(path.exists() for path in paths)
    assert numbers(store) == list(range(50))


def test_only_equal_rows_are_one_row(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, other = row(1, received_ns=5), row(1, status="error")
    for rows in ([first, row(2)], [row(1, received_ns=9), other], [other]):
        store.write("spans", SPANS.from_rows(rows))
    assert compact(store, NOW).counts["rows_sent_again"] == 2
    read = store.scan_as_received("spans").select("start_ns", "status", "received_ns").collect()
    assert sorted(read.rows(), key=str) == [(1, "error", 1), (1, None, 5), (2, None, 1)]


def test_files_stay_small_enough_and_full_ones_stay_as_they_are(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for at in range(0, 200, 20):
        write(store, *range(at, at + 20))
    limits = CompactionLimits(min_age_s=0, unfinished_files=2, lease_s=0, max_rows=50)
    compact(store, limits, tables=["spans"])
    sizes = [store.footer(file).num_rows for file in store.visible("spans")]
    assert sum(sizes) == 200 and max(sizes) <= 50 and len(sizes) <= 6
    files = store.files("spans")
    compact(store, limits, tables=["spans"])
    assert store.files("spans") == files
    assert numbers(store) == list(range(200))


def test_young_files_and_a_leased_hour_are_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    files = [write(store, number) for number in range(3)]
    assert compact(store).counts == {}
    leased = CompactionLimits(min_age_s=0, unfinished_files=2, lease_s=60)
    (tmp_path / "default/markers/spans").mkdir(parents=True)
    (tmp_path / f"default/markers/spans/{files[0].parent.name}.000001.lease").touch()
    assert compact(store, leased).counts == {"hours_leased": 1}
    assert store.files("spans") == files


def test_a_merged_file_counts_where_its_newest_row_would(tmp_path: Path) -> None:
    store = Store(tmp_path)
    base_ns = time.time_ns() // (3600 * 10**9) * 3600 * 10**9
    for number in range(3):
        write(store, number, name=f"{base_ns + number}-abcd")
    compact(store, NOW)
    assert len(store.files("spans", base_ns + 2)) == 1
    assert store.files("spans", base_ns + 3) == []


def test_a_replayed_file_is_not_seen_again(tmp_path: Path) -> None:
    """A collector that died between file and log writes the file again, however late."""
    store = Store(tmp_path)
    name = f"{time.time_ns()}-0a0b0c0d"
    first = write(store, 1, 2, name=name)
    assert write(store, 8, 9, name=name) == first
    assert numbers(store) == [1, 2]
    write(store, 3)
    compact(store, NOW)
    assert write(store, 1, 2, name=name) == first
    assert numbers(store) == [1, 2, 3]
    compact(store, AT_ONCE)
    assert not first.exists()
    write(store, 1, 2, name=name)
    assert first.exists() and numbers(store) == [1, 2, 3]
    compact(store, AT_ONCE)
    assert not first.exists()


def test_without_its_marker_a_merged_file_does_not_count(tmp_path: Path) -> None:
    """What a compactor leaves that dies just before its commit, and just after another's."""
    store = Store(tmp_path)
    source = write(store, 1)
    orphan = source.with_name(f"{source.name.partition('-')[0]}-feed-1.parquet")
    orphan.write_bytes(source.read_bytes())
    assert numbers(store) == [1]
    compact(store, AT_ONCE)
    assert orphan.exists()  # whoever made it may be about to commit it
    write(store, 2)
    compact(store, AT_ONCE)  # takes generation 1
    assert numbers(store) == [1, 2]
    assert not orphan.exists()


@pytest.mark.parametrize("harm", ["missing", "cut", "flipped", "other rows"])
def test_sources_stay_unless_what_replaces_them_is_whole(tmp_path: Path, harm: str) -> None:
    store = Store(tmp_path)
    sources = [write(store, number, number + 10) for number in range(3)]
    compact(store, NOW)
    (merged,) = store.files("spans")
    content = bytearray(merged.read_bytes())
    if harm == "missing":
        merged.unlink()
    elif harm == "cut":
        merged.write_bytes(content[:-40])
    elif harm == "flipped":
        content[200] ^= 1
        merged.write_bytes(content)
    else:
        merged.write_bytes(sources[0].read_bytes())
    done = compact(store, AT_ONCE)
    assert (done.damaged, done.kept) == ([str(merged)], [str(path) for path in sources])
    assert done.counts["files_deleted"] == 0 and all(path.exists() for path in sources)
    if harm == "missing":
        assert numbers(store) == [0, 1, 2, 10, 11, 12]
        assert numbers(Store(tmp_path)) == [0, 1, 2, 10, 11, 12]
    write(store, 5), write(store, 6)
    assert compact(store, NOW).counts["files_made"] == 1


def test_sources_go_once_what_replaced_their_replacement_is_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = write(store, 1), write(store, 2)
    compact(store, NOW)
    write(store, 3), write(store, 4)
    compact(store, NOW)
    (middle,) = tmp_path.glob("default/spans/*/*-1.parquet")
    middle.unlink()
    (last,) = store.files("spans")
    content = last.read_bytes()
    last.write_bytes(content[:-40])
    assert compact(store, AT_ONCE).kept and all(path.exists() for path in first)
    last.write_bytes(content)
    assert compact(store, AT_ONCE).counts == {"files_deleted": 4}
    assert numbers(store) == [1, 2, 3, 4]


def test_a_merged_file_whose_marker_was_lost_is_never_deleted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write(store, 1), write(store, 2)
    compact(store, AT_ONCE), compact(store, AT_ONCE)
    (merged,) = store.files("spans")
    (marker,) = tmp_path.glob("default/markers/spans/*.json")
    content = marker.read_bytes()
    marker.unlink()
    write(store, 3), write(store, 4)
    compact(store, AT_ONCE), compact(store, AT_ONCE)  # takes generation 1 again
    assert merged.exists() and numbers(store) == [3, 4]
    assert marker.read_bytes() != content


def test_two_markers_never_have_one_generation(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = write(store, 1)
    ours = Marker(path.parent.name, 1, 5, "1-a-1.parquet", replaces=(path.name,))
    assert commit(store, "spans", ours)
    assert commit(store, "spans", ours)  # our own, whose answer was lost
    assert not commit(store, "spans", Marker(path.parent.name, 1, 5, "1-b-1.parquet"))


@pytest.mark.parametrize("harm", ["missing", "flipped", "cut"])
def test_a_chain_that_cannot_be_read_is_said_not_guessed(tmp_path: Path, harm: str) -> None:
    store = Store(tmp_path)
    for _ in range(2):
        write(store, 1), write(store, 2)
        compact(store, NOW)
    marker = sorted((tmp_path / "default/markers/spans").glob("*.json"))[0]
    content = marker.read_bytes()
    if harm == "missing":
        marker.unlink()
    elif harm == "cut":
        marker.write_bytes(content[:-20])
    else:
        marker.write_bytes(content.replace(b'"rows": 2', b'"rows": 3'))
    with pytest.raises(PartialInputError, match=marker.name.removesuffix(".json")):
        Store(tmp_path).scan("spans")


def test_a_query_begins_again_when_its_files_go(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write(store, 1), write(store, 2)
    times = 0

    def slow(rows: pl.LazyFrame) -> pl.LazyFrame:
        nonlocal times
        times += 1
        compact(store, AT_ONCE), compact(store, AT_ONCE)
        return rows.select("start_ns")

    assert sorted(store.collect("spans", slow)["start_ns"]) == [1, 2]
    assert times == 2
    other = Store(tmp_path)
    rows = other.read_as_received("spans", ["start_ns"], ())
    assert [table["start_ns"].to_pylist() for table in rows] in ([[1, 2]], [[2, 1]])


def test_a_damaged_file_is_named_and_the_others_are_merged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    bad = write(store, *range(100))
    write(store, 101), write(store, 102)
    content = bytearray(bad.read_bytes())
    content[200] ^= 0xFF
    bad.write_bytes(content)
    done = compact(store, NOW)
    assert done.damaged == [str(bad)]
    assert len(store.files("spans")) == 2


def test_many_compactors_at_once_beside_readers_and_a_writer(tmp_path: Path) -> None:
    store = Store(tmp_path)
    written = set(range(30))
    for number in written:
        write(store, number)
    with (
        running(COMPACT_FOREVER, str(tmp_path), "0.5") as one,
        running(COMPACT_FOREVER, str(tmp_path), "0.5") as two,
        running(COMPACT_FOREVER, str(tmp_path), "0.5") as three,
        reading(store, written) as reader,
    ):
        for number in range(30, 90):
            write(store, number)
            written.add(number)
            time.sleep(0.05)
        assert [process.poll() for process in (one, two, three)] == [None] * 3
        assert reader.wrong is None
    assert numbers(store) == list(range(90))


def test_killed_at_any_instant(tmp_path: Path) -> None:
    store = Store(tmp_path)
    written: set[int] = set()
    chance = random.Random(1)
    with reading(store, written):
        for attempt in range(12):
            for number in range(8 * attempt, 8 * attempt + 8):
                write(store, number)
                written.add(number)
            with running(COMPACT_FOREVER, str(tmp_path), "0.2") as process:
                assert process.stdout and process.stdout.readline() == "ready\n"
                time.sleep(chance.random() * 0.25)
                process.kill()
    assert numbers(store) == list(range(96))
    while compact(store, AT_ONCE, tables=["spans"]).counts:
        pass
    assert numbers(store) == list(range(96))
    kept = {path.name for path in tmp_path.glob("default/spans/*/*.parquet")}
    assert kept == {path.name for path in store.files("spans")}


def test_a_compactor_that_slept_through_another_loses(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number in range(5):
        write(store, number)
    with reading(store, set(range(5))), running(SLEEP_BEFORE_COMMIT, str(tmp_path)) as sleeper:
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
        assert len(list(tmp_path.glob("default/spans/*/*-1.parquet"))) == 1
        assert compact(store, AT_ONCE, tables=["spans"]).counts["files_merged"] == 5
        compact(store, AT_ONCE, tables=["spans"])
        merged = store.files("spans")
        assert list(tmp_path.glob("default/spans/*/*.parquet")) == merged
        sleeper.send_signal(signal.SIGCONT)
        said, _ = sleeper.communicate()
        assert "'races_lost': 1" in said
        assert store.files("spans") == merged
    assert numbers(store) == list(range(5))


def test_a_compactor_that_slept_and_is_first_wins(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write(store, 1), write(store, 2)
    with running(SLEEP_BEFORE_COMMIT, str(tmp_path)) as sleeper:
        os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
        write(store, 3)
        assert numbers(store) == [1, 2, 3]
        sleeper.send_signal(signal.SIGCONT)
        assert "'files_made'" in sleeper.communicate()[0]
    assert numbers(store) == [1, 2, 3]


TRACES = st.integers(0, 2)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(TRACES, TRACES, st.sampled_from([None, "ok"]), TRACES, st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
)
def test_merging_keeps_each_different_row_once(
    drawn: list[tuple[int, int, str | None, int, bool]], files: int
) -> None:
    rows = [
        row(trace, span_id=bytes([span]) * 8, status=status, received_ns=at, attributes=pairs)
        for trace, span, status, at, attributed in drawn
        for pairs in ([{"key": "a", "double": float("nan")}] if attributed else None,)
    ]
    parts = [SPANS.from_rows(rows[at::files]) for at in range(files) if rows[at::files]]
    count, batches = merge(parts, SPANS)
    merged = as_declared(pa.concat_tables(batches), SPANS)
    assert merged.num_rows == count
    told = merged.drop_columns("received_ns").to_pylist()
    wanted = SPANS.from_rows(rows).drop_columns("received_ns").to_pylist()
    assert sorted(map(repr, told)) == sorted(set(map(repr, wanted)))
    assert len(sent_again(pa.concat_tables(parts), SPANS)) == len(rows) - count
    order = [(one["trace_id"], one["start_ns"]) for one in told]
    assert order == sorted(order)
    earliest = {
        repr({**one, "received_ns": 0}): one["received_ns"]
        for one in sorted(SPANS.from_rows(rows).to_pylist(), key=lambda one: -one["received_ns"])
    }
    kept = {repr({**one, "received_ns": 0}): one["received_ns"] for one in merged.to_pylist()}
    assert kept == earliest


def test_the_hour_of_a_file_is_that_of_its_name(tmp_path: Path) -> None:
    path = write(Store(tmp_path), 1, name="1700000000000000000-abc")
    assert path.parent.name == hour_of(1_700_000_000 * 10**9) == "2023-11-14T22"
