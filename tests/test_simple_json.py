"""Plain arrays become the same JSON in the kernel as in Python, near their limit or far off."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from otlp_messages import RECEIVED_NS, any_value
from test_wire_scanner import often
from wire_hostile import a_span, field
from wire_verdict import assert_same, rows_of

from perfledger.collectors.wire.span_batch import SpanBatch, SpanReader

LEAST, MOST = -(2**63), 2**63 - 1
integers = st.integers(LEAST, MOST) | st.sampled_from(
    [LEAST, LEAST + 1, -(10**18), -10, -9, -1, 0, 9, 10, 99, 100, 10**18, 10**18 - 1, MOST]
)
plain_texts = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7F), max_size=20)
texts = plain_texts | st.sampled_from(
    ['"', "\\", "\x1f", "\n", "\x7f", "é", "日本", "a" * 90, "\0"]
)
elements = st.none() | st.booleans() | integers | texts


def body_of(array: list[object]) -> bytes:
    pair = KeyValue(key="k", value=any_value(array))
    return a_span(field(0x4A, pair.SerializeToString()))


def json_of(array: list[object], limit: int) -> tuple[str, bool]:
    """Return the JSON of an array, and whether a kernel wrote it."""
    reader = SpanReader(limit)
    batch = SpanBatch(reader, 4096, 4)
    batch.add(body_of(array), RECEIVED_NS)
    ((pair,),) = rows_of(batch)["attributes"].to_pylist()
    return pair["json"], not reader.nested


@settings(often, max_examples=300)
@given(st.lists(elements, max_size=12), st.integers(20, 80))
def test_any_array_is_what_python_makes_of_it(array: list[object], limit: int) -> None:
    body = body_of(array)
    assert_same(body, limit)
    text, _ = json_of(array, limit)
    ((pair,),) = rows_of(filled(body, limit))["attributes"].to_pylist()
    assert pair["json"] == text


def filled(body: bytes, limit: int) -> SpanBatch:
    """Return a batch without room for JSON behind the request: Python must write it."""
    batch = SpanBatch(SpanReader(limit), len(body), 4)
    batch.add(body, RECEIVED_NS)
    return batch


@pytest.mark.parametrize("limit", [20, 27, 40, 79, 80])
def test_every_length_around_the_limit_is_cut_in_the_same_place(limit: int) -> None:
    for length in range(limit + 6):
        for array in (["a" * length], ["b" * (length // 2), "c" * (length - length // 2), 7]):
            assert_same(body_of(array), limit)
    for count in range(limit // 2 + 3):
        assert_same(body_of([1] * count), limit)
        assert_same(body_of([None, LEAST] * (count // 4)), limit)


@settings(often, max_examples=200)
@given(st.lists(st.none() | st.booleans() | integers | plain_texts, max_size=12))
def test_plain_arrays_are_written_by_the_kernel(array: list[object]) -> None:
    text, by_kernel = json_of(array, 2048)
    assert json.loads(text) == array
    is_plain = not any(set(item) & set('"\\') for item in array if isinstance(item, str))
    assert by_kernel == is_plain
