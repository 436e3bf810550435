"""Looking up ids by the million, against a dictionary."""

import polars as pl
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from perfledger.schema.span_ids import SpanIds, SpanIndex, may_be_repeated

# Few different ids, so that many are found; some of a wrong length, some null.
trace_ids = st.sampled_from([b"a" * 16, b"b" * 16, b"\0" * 16, b"a" * 15, b"", None])
span_ids = st.sampled_from([b"1" * 8, b"2" * 8, b"\0" * 8, b"1" * 9, None])
keys = st.lists(st.tuples(trace_ids, span_ids), max_size=12)


def ids(rows: list[tuple[bytes | None, bytes | None]]) -> SpanIds:
    columns = [pl.Series([row[at] for row in rows], dtype=pl.Binary) for at in (0, 1)]
    return SpanIds.of(*columns)


@given(keys, keys)
def test_an_index_finds_what_a_dictionary_finds(
    known: list[tuple[bytes | None, bytes | None]], asked: list[tuple[bytes | None, bytes | None]]
) -> None:
    known = list(dict.fromkeys(known))
    wanted = {
        key: row
        for row, key in enumerate(known)
        if len(key[0] or b"") == 16 and len(key[1] or b"") == 8
    }
    found = SpanIndex(ids(known)).find(ids(asked))
    assert found.tolist() == [wanted.get(key, -1) for key in asked]


def test_a_slice_of_a_column_has_its_own_ids() -> None:
    column = pl.Series([bytes([n]) * 16 for n in range(100)])
    spans = pl.Series([bytes([n]) * 8 for n in range(100)])
    index = SpanIndex(SpanIds.of(column, spans))
    assert index.find(SpanIds.of(column[40:43], spans[40:43])).tolist() == [40, 41, 42]


@given(st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=4))
def test_repeated_ids_are_found_within_and_between_files(files: list[list[int]]) -> None:
    columns = [
        pa.chunked_array([pa.array([n.to_bytes(8, "big") for n in file], pa.binary(8))])
        for file in files
    ]
    flat = [number for file in files for number in file]
    wanted = [[at for at, n in enumerate(file) if flat.count(n) > 1] for file in files]
    assert [rows.tolist() for rows in may_be_repeated(columns)] == wanted
