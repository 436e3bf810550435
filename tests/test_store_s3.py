"""The store in a bucket: the same answers as in a folder, from real S3 servers."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from s3_servers import BUCKET, KINDS, s3_server

from perfledger.collectors.upkeep.compaction import CompactionLimits, commit, compact
from perfledger.collectors.upkeep.store_check import check_store
from perfledger.schema.errors import PartialInputError, UsageError
from perfledger.schema.store import Store
from perfledger.schema.store_places import Place, place_at
from perfledger.schema.store_snapshot import Marker
from perfledger.schema.tables import SPANS

AT_ONCE = CompactionLimits(min_age_s=0, unfinished_files=2, lease_s=0, grace_s=0)
COMPACT = """
import json, sys
from perfledger.collectors.upkeep.compaction import CompactionLimits, compact
from perfledger.schema.store import Store
limits = CompactionLimits(0, 2, lease_s=0, grace_s=60)
print(json.dumps(compact(Store.at(sys.argv[1]), limits, tables=["spans"]).counts))
"""


@pytest.fixture(scope="module", params=KINDS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    with (
        s3_server(request.param, tmp_path_factory.mktemp("s3")) as variables,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in variables.items():
            patch.setenv(name, value)
        yield request.param


@pytest.fixture
def url(server: str, request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name.partition('[')[0]}"


def rows(*numbers: int) -> pa.Table:
    return SPANS.from_rows(
        {
            "trace_id": number.to_bytes(16, "little"),
            "span_id": number.to_bytes(8, "big"),
            "name": "chat",
            "kind": "server",
            "start_ns": number,
            "end_ns": number + 1,
            "received_ns": 1,
        }
        for number in numbers
    )


def numbers(store: Store) -> list[int]:
    return sorted(store.collect("spans", as_received=True)["start_ns"].to_list())


def test_a_place_in_a_bucket_does_as_a_folder_does(url: str, tmp_path: Path) -> None:
    def told(place: Place) -> list[object]:
        said: list[object] = [place.list("ns/t"), place.folders(), place.exists("ns/t/1/a")]
        content = pa.py_buffer(b"0123456789")
        said += [place.create(key, content) for key in ("ns/t/1/a", "ns/t/2/b", "ns/t/1/a")]
        said += [[entry.key for entry in place.list("ns/t", first)] for first in ("", "1", "2")]
        said += [place.read("ns/t/1/a").to_pybytes(), place.exists("ns/t/1/a"), place.folders()]
        with place.open("ns/t/2/b") as file:
            file.seek(3)
            said += [file.read(4), file.tell(), file.size(), file.read(), file.read()]
        place.delete("ns/t/1/a"), place.delete("ns/t/1/a")
        place.prepare("ns")
        said.append([(entry.key, entry.bytes) for entry in place.list("ns")])
        for read in (place.read, place.open):
            with pytest.raises(FileNotFoundError):
                read("ns/t/1/a")
        return said

    assert told(place_at(url)) == told(place_at(str(tmp_path)))


def test_what_is_written_is_read(url: str) -> None:
    store = Store.at(url)
    store.prepare()
    assert store.scan("spans").collect().is_empty()
    path = store.write("spans", rows(3, 1), name="1700000000000000000-abc")
    assert store.write("spans", rows(9), name="1700000000000000000-abc") == path
    store.write("spans", rows(2, 3))
    assert numbers(store) == [1, 2, 3, 3]
    assert sorted(store.scan("spans").collect()["start_ns"]) == [1, 2, 3]
    assert len(store.files("spans", 1_700_000_000_000_000_001)) == 1
    assert [store.footer(file).num_rows for file in store.files("spans")] == [2, 2]
    parts = store.read_as_received("spans", ["start_ns"], ())
    assert [part["start_ns"].to_pylist() for part in parts] == [[1, 3], [2, 3]]
    assert store.trace((3).to_bytes(16, "little"))["start_ns"].to_list() == [3]
    assert store.trace(b"absent" + bytes(10)).is_empty()
    assert Store.at(url, "other").scan("spans").collect().is_empty()


def test_compactors_at_once_see_each_row_once(url: str) -> None:
    store = Store.at(url)
    for number in range(6):
        store.write("spans", rows(number))
    command = [sys.executable, "-P", "-c", COMPACT, url]
    racing = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    while any(process.poll() is None for process in racing):
        assert numbers(store) == list(range(6))
    done = [json.loads(process.communicate()[0]) for process in racing]
    assert sum(one.get("files_made", 0) for one in done) == 1
    assert numbers(store) == list(range(6))
    assert compact(store, AT_ONCE, tables=["spans"]).counts["files_deleted"] >= 6
    assert len(store.place.list("default/spans")) == 1
    assert numbers(store) == list(range(6))
    assert check_store(store).problems == []


def test_a_generation_has_one_marker(url: str) -> None:
    store = Store.at(url)
    ours = Marker("2026-01-01T00", 1, 5, "1-a-1.parquet")
    assert commit(store, "spans", ours) and commit(store, "spans", ours)
    assert not commit(store, "spans", Marker("2026-01-01T00", 1, 5, "1-b-1.parquet"))


def test_a_query_begins_again_when_its_objects_go(url: str) -> None:
    store = Store.at(url)
    store.write("spans", rows(1)), store.write("spans", rows(2))
    store.trace(bytes(16))
    seen = store.snapshot("spans")
    other = Store.at(url)
    query = other.scan("spans")
    compact(store, AT_ONCE, tables=["spans"]), compact(store, AT_ONCE, tables=["spans"])
    with pytest.raises(FileNotFoundError):
        query.collect()
    assert numbers(other) == [1, 2]
    assert len(seen.visible) == 2 and len(other.visible("spans")) == 1
    assert store.trace((2).to_bytes(16, "little"))["start_ns"].to_list() == [2]


def test_a_damaged_object_is_named(url: str) -> None:
    store = Store.at(url)
    store.write("spans", rows(1))
    (file,) = store.visible("spans")
    content = bytearray(store.place.read(file.key).to_pybytes())
    content[-30] ^= 0xFF
    store.place.delete(file.key)
    store.place.create(file.key, pa.py_buffer(bytes(content[:-200])))
    with pytest.raises(PartialInputError, match=file.name):
        store.collect("spans")
    assert [problem.where for problem in check_store(store).problems] == [f"{url}/{file.key}"]


def test_a_bucket_that_is_not_there_is_found_out_at_the_start(server: str) -> None:
    with pytest.raises(UsageError, match="cannot write to the store"):
        Store.at("s3://nobody-has-this/x").prepare()
