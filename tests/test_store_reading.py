"""Reading the store: traces by their id, files of older versions, and files that are damaged."""

import random
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.collectors.upkeep.compaction import CompactionLimits, compact
from perfledger.schema import store_files
from perfledger.schema.encoded_columns import encoded
from perfledger.schema.errors import PartialInputError, UsageError
from perfledger.schema.step_members import MEMBER_LEAVES
from perfledger.schema.store import Store
from perfledger.schema.store_files import ROW_GROUP_ROWS, as_declared, encode, high_words
from perfledger.schema.store_index import FileIndex, TraceIndex
from perfledger.schema.tables import KEY_VALUES, SPANS, STEPS

AT_ONCE = CompactionLimits(min_age_s=0, unfinished_files=2, lease_s=0, grace_s=0)


def row(trace_id: bytes, span: int, **changes: object) -> dict[str, object]:
    times = {"start_ns": 1_000 - span, "end_ns": 2_000, "received_ns": 3_000}
    ids = {"trace_id": trace_id, "span_id": span.to_bytes(8, "big")}
    return {**ids, "name": "chat", "kind": "server", **times, **changes}


def spans_of(read: pl.DataFrame) -> list[int]:
    return [int.from_bytes(span, "big") for span in read["span_id"]]


IDS = st.one_of(
    st.binary(min_size=16, max_size=16),
    # Ids with one first half, and ids at the ends of the range.
    st.binary(min_size=8, max_size=8).map(lambda low: b"\x80same\x00\x00\x00" + low),
    st.sampled_from([bytes(16), b"\xff" * 16, b"\xff" * 8 + bytes(8)]),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(IDS, min_size=1, max_size=30), st.lists(IDS, max_size=10), st.integers(1, 3))
def test_a_trace_is_found_whole_wherever_its_spans_are(
    tmp_path_factory: pytest.TempPathFactory, ids: list[bytes], others: list[bytes], files: int
) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    rows = [row(trace_id, number) for number, trace_id in enumerate(ids)]
    for part in range(files):
        again = rows[0]  # sent again with every file
        store.write("spans", SPANS.from_rows([*rows[part::files], again]))
    for trace_id in {*ids, *others}:
        read = store.trace(trace_id)
        wanted = [number for number, one in enumerate(ids) if one == trace_id]
        assert spans_of(read) == sorted(wanted, reverse=True)  # by their start
        assert read.columns == SPANS.names()


def test_a_trace_is_found_in_any_row_group_before_and_after_merging(tmp_path: Path) -> None:
    store, draw = Store(tmp_path), random.Random(5)
    ids = [draw.randbytes(16) for _ in range(ROW_GROUP_ROWS // 2)]
    for file in range(3):
        rows = [row(trace_id, 3 * at + file) for at, trace_id in enumerate(ids)]
        store.write("spans", SPANS.from_rows(rows))
    ordered = sorted(range(len(ids)), key=ids.__getitem__)
    for _ in ("as received", "merged"):
        for at in (*ordered[:2], *ordered[-2:], *draw.sample(ordered, 10)):
            assert spans_of(store.trace(ids[at])) == [3 * at + 2, 3 * at + 1, 3 * at]
        assert store.trace(draw.randbytes(16)).is_empty()
        compact(store, AT_ONCE, tables=["spans"])
    (merged,) = store.files("spans")
    assert pq.read_metadata(merged).num_row_groups == 2


def test_a_trace_that_goes_on_is_seen(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for span in range(3):
        store.write("spans", SPANS.from_rows([row(b"t" * 16, span)]))
        assert spans_of(store.trace(b"t" * 16)) == list(range(span, -1, -1))


@given(st.lists(IDS, min_size=1).map(sorted))
def test_an_index_has_each_first_half_once_with_its_rows(ids: list[bytes]) -> None:
    column = pa.chunked_array([pa.array(ids[:3], pa.binary(16)), pa.array(ids[3:], pa.binary(16))])
    assert high_words(column).tolist() == [int.from_bytes(one[:8], "big") for one in ids]
    sliced = pa.chunked_array(
        [pa.array([b"x" * 16, *ids, b"y" * 16], pa.binary(16)).slice(1, len(ids))]
    )
    for index in (FileIndex.of(column), FileIndex.of(sliced)):
        for one in ids:
            found = index.find(one)
            same = [at for at, other in enumerate(ids) if other[:8] == one[:8]]
            assert found == (same[0], len(same))


def test_the_index_keeps_to_its_memory(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for span in range(4):
        store.write("spans", SPANS.from_rows([row(bytes([span]) * 16, span)]))
    files = store.visible("spans")
    index = TraceIndex(max_bytes=40)
    opened: list[str] = []

    def open_file(key: str) -> pa.NativeFile:
        opened.append(key)
        return store.place.open(key)

    for file in (files[0], files[1], files[1], files[2], files[3], files[0], files[3]):
        assert index.of(file.key, lambda key=file.key: open_file(key)).words.size == 1
    read = [files.index(next(one for one in files if one.key == key)) for key in opened]
    assert read == [0, 1, 2, 3, 0]


def test_a_merged_file_that_is_missing_is_named_by_every_reader(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for span in range(2):
        store.write("spans", SPANS.from_rows([row(b"t" * 16, span)]))
    compact(store, AT_ONCE), compact(store, AT_ONCE)
    (merged,) = store.files("spans")
    merged.unlink()
    readers: list[Callable[[], object]] = [
        lambda: store.scan("spans"),
        lambda: store.require("spans"),
        lambda: store.collect("spans"),
        lambda: store.trace(b"t" * 16),
        lambda: list(store.read_as_received("spans", ["name"], ())),
    ]
    for read in readers:
        with pytest.raises(PartialInputError, match=merged.name):
            read()


def older(rows: pa.Table) -> pa.Table:
    """Return rows as version 0.1.0 wrote them."""
    pairs = [
        {"key": "host.name", "text": "a"},
        {"key": "cores", "int": 2},
        {"key": "tags", "json": "[1]"},
        {"key": "raw", "bytes": b"\x01"},
        {"key": "none"},
    ]
    at = rows.column_names.index("resource_attributes")
    resource = pa.array([pairs] * rows.num_rows, KEY_VALUES)
    rows = rows.set_column(at, "resource_attributes", resource)
    return rows.drop_columns(["kept_share"])


def test_columns_that_older_files_lack_are_null(tmp_path: Path) -> None:
    store = Store(tmp_path)
    old = SPANS.from_rows([row(b"o" * 16, 1)]).drop_columns(["kept_share", "flags"])
    path = store.write("spans", SPANS.from_rows([row(b"n" * 16, 2, kept_share=0.5)]))
    pq.write_table(old, path.with_name("1600000000000000000-old.parquet"))
    read = store.scan("spans").select("span_id", "kept_share", "flags").sort("span_id").collect()
    assert read["kept_share"].to_list() == [None, 0.5]
    assert spans_of(store.trace(b"o" * 16)) == [1]


def test_a_file_whose_types_are_older_is_named_and_written_anew(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.write("spans", SPANS.from_rows([row(b"n" * 16, 2, resource_attributes="{}")]))
    old = path.with_name(f"{path.name.partition('-')[0]}-01d.parquet")
    pq.write_table(older(SPANS.from_rows([row(b"o" * 16, 1)])), old)
    assert store.collect("spans", lambda rows: rows.select("name")).height == 2
    with pytest.raises(PartialInputError, match=f"(?s)older version.*{old.name}.*store compact"):
        store.collect("spans")
    compact(store, AT_ONCE, tables=["spans"])
    read = store.collect("spans", lambda rows: rows.sort("span_id"))["resource_attributes"]
    assert read.to_list() == [
        '{"host.name":"a","cores":2,"tags":[1],"raw":"01","none":null}',
        "{}",
    ]


def test_any_other_type_is_refused() -> None:
    wrong = SPANS.from_rows([row(b"t" * 16, 1)])
    at = wrong.column_names.index("start_ns")
    with pytest.raises(PartialInputError, match="column start_ns is"):
        as_declared(wrong.set_column(at, "start_ns", pa.array([[1]])), SPANS)


def test_dictionaries_are_written_as_what_they_hold(tmp_path: Path) -> None:
    plain = SPANS.from_rows([row(b"t" * 16, 1, model="m"), row(b"u" * 16, 2)])
    coded = plain
    for name in ("name", "kind", "model", "resource_attributes"):
        at = coded.column_names.index(name)
        coded = coded.set_column(at, name, coded[name].dictionary_encode())
    path = Store(tmp_path).write("spans", coded)
    assert as_declared(pq.read_table(path, partitioning=None), SPANS).equals(plain)


@pytest.mark.parametrize("cut", [0, 7, 100, -1, -9])
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, cut: int) -> None:
    store = Store(tmp_path)
    store.write("spans", SPANS.from_rows([row(b"t" * 16, 1)]))
    path = store.write("spans", SPANS.from_rows([row(b"t" * 16, 2)]))
    path.write_bytes(path.read_bytes()[:cut])
    for read in (lambda: store.scan("spans"), lambda: store.collect("spans")):
        with pytest.raises(PartialInputError, match=path.name):
            read()
    with pytest.raises(PartialInputError, match=path.name):
        store.trace(b"t" * 16)
    with pytest.raises(PartialInputError, match=path.name):
        list(store.read_as_received("spans", ["start_ns"], ()))


@pytest.mark.parametrize("steps", [3, 40, 400], ids=["one group", "many groups", "no dictionary"])
def test_encoded_leaves_are_the_members_however_the_file_is_laid_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """pyarrow reads no nested leaf that has several dictionaries: one a group, or given up."""
    if steps == 40:
        monkeypatch.setattr(store_files, "ROW_GROUP_ROWS", 16)
    members = 3 if steps < 400 else 300  # 120,000 ids are over a megabyte: the writer's limit
    names = ("replica", "rank", "step_seq", "trace_id", "span_id", "kind", "start_ns")
    draw = random.Random(0)
    rows = []
    for seq in range(steps):
        step = ("0", 0, seq, b"e" * 16, seq.to_bytes(8, "big"), "decode_step", seq)
        rows.append(dict(zip(names, step, strict=True)) | {"schedule_end_ns": seq, "end_ns": seq})
        rows[-1]["received_ns"] = seq
        rows[-1]["members"] = [
            {"trace_id": draw.randbytes(16), "span_id": draw.randbytes(8), "phase": "decode"}
            for _ in range(members)
        ]
    store = Store(tmp_path)
    store.write("steps", STEPS.from_rows(rows))
    leaves = ["step_seq", *MEMBER_LEAVES]
    (read,) = store.read_as_received("steps", leaves, MEMBER_LEAVES)
    found = []
    for lists in read["members"].chunks:
        ids = [encoded(lists.values.field(name)).to_pylist() for name in ("trace_id", "span_id")]
        found += list(zip(*ids, strict=True))
    assert found == [(m["trace_id"], m["span_id"]) for one in rows for m in one["members"]]
    assert read["step_seq"].to_pylist() == list(range(steps))


def test_an_error_that_a_flipped_bit_causes_names_the_file(tmp_path: Path) -> None:
    """A query that gets through may be wrong: `verify` compares checksums, polars does not."""
    store, draw = Store(tmp_path), random.Random(3)
    path = store.write("spans", SPANS.from_rows(row(draw.randbytes(16), n) for n in range(200)))
    content, named = path.read_bytes(), 0
    for _ in range(60):
        harmed = bytearray(content)
        harmed[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(harmed)
        try:
            store.collect("spans")
        except PartialInputError as error:
            assert path.name in str(error)
            named += 1
    assert named > 3


TEXTS = st.none() | st.sampled_from(["", "x", "é"])
PAIRS = st.fixed_dictionaries(
    {"key": st.sampled_from(["a", "b"])},
    optional={
        "text": TEXTS,
        "int": st.none() | st.integers(-(2**63), 2**63 - 1),
        "bool": st.none() | st.booleans(),
        "bytes": st.none() | st.binary(max_size=3),
    },
)
NESTED = st.fixed_dictionaries(
    {},
    optional={
        "model": TEXTS,
        "attributes": st.none() | st.lists(PAIRS, max_size=3),
        "events": st.none()
        | st.lists(
            st.fixed_dictionaries(
                {"name": TEXTS}, optional={"attributes": st.none() | st.lists(PAIRS, max_size=2)}
            ),
            max_size=2,
        ),
        "links": st.none() | st.lists(st.fixed_dictionaries({"phase": TEXTS}), max_size=2),
    },
)


@settings(max_examples=100, deadline=None)
@given(st.lists(NESTED, min_size=1, max_size=6), st.integers(0, 5))
def test_what_is_left_out_because_it_is_empty_comes_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[dict[str, object]], begin: int
) -> None:
    store = Store(tmp_path_factory.mktemp("store"))
    rows = [row(bytes([at]) * 16, at, **values) for at, values in enumerate(drawn)]
    written = SPANS.from_rows([*rows[:begin], *rows]).slice(min(begin, len(rows)))
    path = store.write("spans", written)
    read = pq.read_table(path, partitioning=None)
    assert as_declared(read, SPANS).to_pylist() == written.to_pylist()
    scanned = store.scan_as_received("spans").collect()
    assert scanned.equals(pl.DataFrame(written))
    (columns,) = store.read_as_received("spans", ["model", "flags", "start_ns"], ["model"])
    assert columns["model"].to_pylist() == written["model"].to_pylist()
    assert columns["flags"].null_count == len(written)


def test_no_rows_are_a_file_too() -> None:
    for batches in ([], [SPANS.arrow().empty_table()]):
        content = encode(batches, SPANS)
        read = pq.read_table(pa.BufferReader(content))
        assert (read.num_rows, read.column_names) == (0, SPANS.names())


def test_only_a_local_store_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Store(tmp_path).root == tmp_path
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(UsageError, match="is no folder"):
        Store.at("s3://bucket/x").root  # noqa: B018
