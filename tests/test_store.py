"""The store: what is written is read, once, and half-written files are never seen."""

import os
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.schema.errors import NoDataError, UsageError
from perfledger.schema.store import Store, id_conflicts, written_ns
from perfledger.schema.store_files import as_declared
from perfledger.schema.tables import REQUESTS, SPANS, TABLES

ROW: dict[str, object] = {
    "trace_id": bytes(range(16)),
    "span_id": bytes(range(8)),
    "name": "chat",
    "kind": "server",
    "start_ns": 1_000,
    "end_ns": 2_000,
    "received_ns": 3_000,
}


def spans(*changes: dict[str, object]) -> pa.Table:
    return SPANS.from_rows([{**ROW, **change} for change in changes])


def test_every_value_kind_comes_back_as_it_was(tmp_path: Path) -> None:
    attributes = [
        {"key": "a", "text": "x"},
        {"key": "a", "int": 2**62},
        {"key": "b", "double": 0.5},
        {"key": "c", "bool": False},
        {"key": "d", "bytes": b"\x00\xff"},
        {"key": "e", "json": "[1,null]"},
        {"key": "empty"},
    ]
    link = {"trace_id": b"t" * 16, "span_id": b"s" * 8, "phase": "decode", "tokens": 1}
    written = spans({"attributes": attributes, "links": [link], "parent_span_id": b"p" * 8})
    store = Store.at(str(tmp_path))
    path = store.write("spans", written)
    assert as_declared(pq.read_table(path, partitioning=None), SPANS).equals(written)
    read = store.scan_as_received("spans").collect()
    assert read["attributes"].to_list() == written["attributes"].to_pylist()
    read = store.scan("spans").collect()
    assert read.to_arrow().select(["trace_id", "span_id", "start_ns"]).to_pylist() == [
        {key: ROW[key] for key in ("trace_id", "span_id", "start_ns")}
    ]
    assert read.columns == SPANS.names()


def test_a_resent_span_counts_once_and_a_conflicting_one_is_flagged(tmp_path: Path) -> None:
    store = Store.at(str(tmp_path))
    store.write("spans", spans({}, {}))
    store.write("spans", spans({"received_ns": 9_000}, {"name": "other"}))
    read = store.scan("spans").collect()
    assert sorted(read["name"].to_list()) == ["chat", "other"]
    conflicts = id_conflicts(store.scan("spans")).collect()
    assert conflicts.rows() == [(ROW["trace_id"], ROW["span_id"], 2)]


def test_the_newest_version_of_a_request_is_shown(tmp_path: Path) -> None:
    required = {c.name: 0 for c in REQUESTS.columns if c.required and pa.types.is_integer(c.type)}
    row = {**required, "trace_id": b"t" * 16, "span_id": b"s" * 8, "status": "ok"}
    row["longest"] = "queue"
    store = Store.at(str(tmp_path))
    for version in (1, 3, 2):
        store.write("requests", REQUESTS.from_rows([{**row, "version": version}]))
    assert store.scan("requests").collect()["version"].to_list() == [3]


def test_a_file_that_was_being_written_when_the_host_died_is_not_data(tmp_path: Path) -> None:
    store = Store.at(str(tmp_path))
    path = store.write("spans", spans({}))
    path.with_name("1-dead.writing").write_bytes(path.read_bytes()[:50])
    assert store.files("spans") == [path]
    assert store.scan("spans").collect().height == 1


@pytest.mark.parametrize("table", TABLES)
def test_a_table_without_files_has_its_columns_and_no_rows(tmp_path: Path, table: str) -> None:
    empty = Store.at(str(tmp_path)).scan(table).collect()
    assert (empty.height, empty.columns) == (0, TABLES[table].names())


def test_asking_an_empty_store_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoDataError, match="perfledger collect"):
        Store.at(str(tmp_path)).require("spans")


def test_files_are_found_by_when_they_were_written(tmp_path: Path) -> None:
    store = Store.at(str(tmp_path))
    old, new = store.write("spans", spans({})), store.write("spans", spans({"name": "new"}))
    assert store.files("spans", written_ns(new)) == [new]
    assert store.scan("spans", written_ns(new)).collect()["name"].to_list() == ["new"]
    assert store.files("spans", written_ns(old)) == store.files("spans") == [old, new]
    assert store.files("spans", written_ns(new) + 1) == []


def test_a_folder_that_cannot_be_written_is_found_out_at_the_start(tmp_path: Path) -> None:
    store = Store.at(str(tmp_path / "new"))
    store.prepare()
    assert list((tmp_path / "new" / "default").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write to the store: Not a directory"):
        Store.at(str(tmp_path / "file" / "store")).prepare()


@pytest.mark.parametrize("prepared", [False, True])
def test_each_new_folder_is_on_disk_before_its_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prepared: bool
) -> None:
    """A file survives a power cut only if every folder on its way is an entry that does."""
    synced: list[Path] = []
    fsync = os.fsync

    def spy(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", spy)
    store = Store.at(str(tmp_path / "new" / "store"))
    if prepared:
        store.prepare()
    path = store.write("spans", spans({}))
    ancestors = [path, *path.parents]
    on_the_way = ancestors[1 : ancestors.index(tmp_path) + 1]
    scratches = [at for at in synced if at.suffix == ".writing"]
    assert [at.name.startswith(path.stem) for at in scratches] == [True]
    assert set(synced) == {*scratches, *on_the_way}
    synced.clear()
    again = store.write("spans", spans({}))
    assert synced[0].name.startswith(again.stem) and synced[-1] == again.parent


@pytest.mark.parametrize(
    ("url", "said"),
    [("http://x", "local folder"), ("s3://", "no bucket"), ("s3:///x", "no bucket")],
)
def test_a_url_that_cannot_be_opened_is_refused(url: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Store.at(url)


def test_a_file_or_nothing_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is not a folder"):
        Store.at(str(tmp_path / "file"))
    with pytest.raises(UsageError, match="has no name"):
        Store.at("")


@pytest.mark.parametrize("namespace", ["", "..", "a/b", "A", "-x"])
def test_a_namespace_never_leaves_the_store(namespace: str) -> None:
    with pytest.raises(UsageError, match="not a namespace"):
        Store.at("x", namespace)


def test_namespaces_do_not_see_each_other(tmp_path: Path) -> None:
    Store.at(str(tmp_path), "a").write("spans", spans({}))
    assert Store.at(str(tmp_path), "b").scan("spans").collect().height == 0


def test_a_column_that_is_not_declared_is_an_error() -> None:
    with pytest.raises(KeyError, match="spans has no column"):
        SPANS.from_rows([{**ROW, "surprise": 1}])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2**63 - 2)), min_size=1
    ),
    st.integers(1, 4),
)
def test_any_split_into_files_reads_as_the_set_of_rows(
    tmp_path_factory: pytest.TempPathFactory, keys: list[tuple[int, int, int]], files: int
) -> None:
    store = Store.at(str(tmp_path_factory.mktemp("store")))
    rows = [
        {"trace_id": bytes([t]) * 16, "span_id": bytes([s]) * 8, "start_ns": at, "end_ns": at + 1}
        for t, s, at in keys
    ]
    for part in range(files):
        if chosen := rows[part::files]:
            store.write("spans", spans(*chosen))
    read = store.scan("spans").select("trace_id", "span_id", "start_ns").collect()
    assert set(read.rows()) == {(bytes([t]) * 16, bytes([s]) * 8, at) for t, s, at in keys}
    assert read.height == len(set(keys))
    assert read.filter(pl.col("start_ns") < 0).height == 0


def test_nested_values_are_encoded_like_flat_ones(tmp_path: Path) -> None:
    """Names of nested values differ in Parquet: a rule for flat columns would pass them by."""
    member = {"trace_id": b"t" * 16, "span_id": b"s" * 8, "phase": "decode", "tokens": 1}
    step = {"replica": "0", "rank": 0, "kind": "decode_step", "members": [member]}
    stamps = ("start_ns", "schedule_end_ns", "end_ns", "received_ns", "step_seq")
    row = {"trace_id": b"e" * 16, "span_id": b"e" * 8, **step, **dict.fromkeys(stamps, 1)}
    path = Store(tmp_path).write("steps", TABLES["steps"].from_rows([row]))
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = (group.column(at) for at in range(group.num_columns))
    encodings = {column.path_in_schema: column.encodings for column in columns}
    assert "RLE_DICTIONARY" in encodings["members.list.element.trace_id"]
    assert "RLE_DICTIONARY" in encodings["replica"]
    assert "DELTA_BINARY_PACKED" in encodings["start_ns"]
