"""From a batch to its table and file: the order of rows, keys as dictionaries, plain attributes."""

import struct

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from otlp_messages import RECEIVED_NS
from test_wire_scanner import often
from wire_hostile import a_span, attribute, field, request
from wire_verdict import assert_same

from perfledger.collectors.wire.assemble import in_order, spans_table
from perfledger.collectors.wire.keys import hash_of
from perfledger.collectors.wire.recent_spans import RecentSpans
from perfledger.collectors.wire.span_batch import SpanBatch, SpanReader
from perfledger.schema.store_files import ROW_GROUP_ROWS, as_declared, encode
from perfledger.schema.store_pruning import without_empty
from perfledger.schema.tables import SPANS

MANY = 300  # spans of one trace: more than are sorted by insertion


def span(trace: tuple[int, int], number: int, start_ns: int, attributes: bytes = b"") -> bytes:
    ids = b"\x0a\x10" + struct.pack(">QQ", *trace) + b"\x12\x08" + struct.pack(">Q", number + 1)
    times = b"\x39" + struct.pack("<Q", start_ns) + b"\x41" + struct.pack("<Q", start_ns)
    return field(0x12, ids + times + attributes)


words = st.sampled_from([1, 2, 2**63, 2**64 - 1])


@often
@given(st.lists(st.tuples(words, words, st.integers(1, 3)), min_size=1, max_size=40))
def test_rows_are_sorted_by_trace_and_start_and_else_as_they_came(
    spans: list[tuple[int, int, int]],
) -> None:
    assert order_of(spans) == sorted(range(len(spans)), key=lambda index: spans[index])


def test_a_trace_of_many_spans_is_sorted_too() -> None:
    spans = [(7, 7, 1 + index * 31 % 50) for index in range(MANY)] + [(1, 1, 1)]
    assert order_of(spans) == sorted(range(len(spans)), key=lambda index: spans[index])


def order_of(spans: list[tuple[int, int, int]]) -> list[int]:
    batch = SpanBatch(SpanReader(64))
    made = (span((high, low), index, at) for index, (high, low, at) in enumerate(spans))
    batch.add(request(b"".join(made)), RECEIVED_NS)
    return [int(row) for row in in_order(batch)]


@pytest.mark.parametrize("length", [1, 100], ids=["short keys", "over a dictionary page"])
def test_keys_are_a_dictionary_in_memory_and_texts_in_the_file(length: int) -> None:
    """Over several row groups, and though the table of keys was emptied meanwhile."""
    batch, keys = SpanBatch(SpanReader(2048)), 12_000
    wanted = [f"{number % keys}{'k' * length}" for number in range(ROW_GROUP_ROWS + 2000)]
    for first in range(0, len(wanted), 1000):
        spans = (
            span((1, number + 1), number, 1, attribute(b"\x18\5", wanted[number].encode()))
            for number in range(first, min(first + 1000, len(wanted)))
        )
        batch.add(request(b"".join(spans)), RECEIVED_NS)
    assert len(batch.key_names) > len(set(batch.key_names)) == keys
    rows = as_declared(spans_table(batch, in_order(batch)), SPANS)
    rows.validate(full=True)
    assert pa.types.is_dictionary(rows["attributes"].type.value_type.field("key").type)
    file = pq.ParquetFile(pa.BufferReader(encode([without_empty(rows, SPANS)], SPANS)))
    found = file.read()["attributes"].to_pylist()
    assert file.num_row_groups == 2
    assert found == [[{"key": key, "int": 5}] for key in wanted]


@pytest.mark.parametrize("key", [0, 1, 7, 8, 100, 127, 128, 200])
def test_plain_attributes_of_every_length(key: int) -> None:
    """Texts around the lengths that take one byte and two, numbers of every width and some odd."""
    texts = [b"\x0a" + short_length(size) + b"v" * size for size in (*range(10), *range(110, 140))]
    numbers = [
        tag + bytes([0x80] * size) + b"\1" for tag in (b"\x18", b"\x10") for size in range(9)
    ]
    doubles = [b"\x21" + struct.pack("<d", value) for value in (0.0, -1.5, float("inf"))]
    odd = [b"\x18\1\x18\2", b"\x0a\1a\x0a\1b", b"\x18\x80\0", b"", b"\x10\0", b"\x18" + b"\xff" * 9]
    pairs = b""
    for index, value in enumerate([*texts, *numbers, *doubles, *odd[:-1], odd[-1] + b"\1"]):
        name = f"{index:02}".encode()[:key] + b"k" * (key - 2)
        inner = (
            b"\x0a" + short_length(len(name)) + name + b"\x12" + short_length(len(value)) + value
        )
        pairs += b"\x4a" + short_length(len(inner)) + inner
    assert_same(a_span(pairs))


def short_length(size: int) -> bytes:
    """Return a length as a varint that is as short as it can be."""
    return bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])


def test_both_hashes_of_a_span_are_of_its_bytes_and_the_seed(tmp_path: object) -> None:
    batch = SpanBatch(SpanReader(64))
    bodies = [attribute(b"\x0a" + bytes([size]) + b"v" * size) for size in range(20)]
    spans = [span((1, 1), 1, 1, body) for body in bodies]
    batch.add(request(b"".join(spans)), RECEIVED_NS)
    recent = RecentSpans(tmp_path)
    _, hashes = recent.take_new(batch)
    for index, whole in enumerate(spans):
        data = np.frombuffer(whole[6:], np.uint8)  # behind tag and length
        where, seed = data.ctypes.data, np.uint64(recent._seed)
        one, two = hash_of(where, data.size, seed), hash_of(where, data.size, ~seed)
        assert hashes[:, index].tolist() == [int(one) | 1, int(two)]
