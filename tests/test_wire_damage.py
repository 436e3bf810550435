"""Damaged requests of spans: what is broken goes alone, no content stays, nothing is confused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from otlp_messages import RECEIVED_NS, any_value
from test_wire_scanner import often, seeds
from wire_damage import damaged, group
from wire_forms import Writer
from wire_hostile import a_span, attribute, field, request
from wire_verdict import BROKEN, assert_equal, assert_survived, rows_of, scanned

from perfledger.collectors.wire.span_batch import Malformed, SpanBatch, SpanReader

CANARY = b"canary-2f9c1b"
SPAN = b"\x0a\x10" + b"t" * 16 + b"\x12\x08" + b"s" * 8


@settings(often, max_examples=800)
@given(seeds, st.integers(32, 90))
def test_damaged_requests_are_refused_or_lose_the_broken_spans_only(seed: int, limit: int) -> None:
    assert_survived(damaged(seed), limit)


@settings(often, max_examples=300)
@given(st.binary(max_size=300), st.integers(32, 90))
def test_any_bytes_are_survived(body: bytes, limit: int) -> None:
    assert_survived(body, limit)


@settings(often, max_examples=300)
@given(seeds, st.sampled_from(["span", "event", "link", "value", "scope"]))
def test_groups_pass_where_the_official_parser_lets_them(seed: int, place: str) -> None:
    inner = group(seed)
    bodies = {
        "span": a_span(inner),
        "event": a_span(field(0x5A, inner)),
        "link": a_span(field(0x6A, field(0x22, inner))),
        "value": a_span(attribute(inner)),
        "scope": request(field(0x0A, inner) + field(0x12, SPAN)),
    }
    assert_survived(bodies[place])


def test_field_number_0_passes_in_a_group_alone() -> None:
    assert assert_survived(a_span(b"\x23\x00\x00\x24")) == "same"
    assert assert_survived(a_span(b"\x23\x02\x00\x03\x04\x24")) == "same"
    assert assert_survived(a_span(b"\x00\x00")) == "broken"


# --- Broken spans and envelopes -------------------------------------------------------------------


@pytest.mark.parametrize(
    "broken", [b"\x0a\x11abc", b"\xff", b"\x0e", b"\x4a\x03\x12\x05\x0a", b"\0"]
)
@pytest.mark.parametrize("beside", [b"", b"\xa3\x01\xa4\x01"], ids=["alone", "beside a group"])
def test_a_broken_span_is_rejected_alone(broken: bytes, beside: bytes) -> None:
    spans = [SPAN + b"\x2a\1a", SPAN + broken + CANARY, SPAN + b"\x2a\1b" + beside]
    rows, tally, kept = scanned(request(b"".join(field(0x12, span) for span in spans)), 99)
    assert rows["name"].to_pylist() == ["a", "b"]
    assert (tally.items, tally.rejected) == (3, {BROKEN: 1})
    assert CANARY not in kept
    # Others can still read what is kept, and find the same two spans.
    message = ExportTraceServiceRequest.FromString(kept)
    assert [s.name for s in message.resource_spans[0].scope_spans[0].spans] == ["a", "b"]


@settings(often, max_examples=100)
@given(seeds)
def test_a_broken_envelope_is_refused(seed: int) -> None:
    body = Writer(seed).request()
    with pytest.raises(Malformed):
        scanned(body + b"\x0a\x05abc", 99)
    with pytest.raises(Malformed):
        scanned(body + field(0x0A, b"\x12\x7f"), 99)
    with pytest.raises(Malformed):
        scanned(body + field(0x0A, b"\x0a\x03\x0a\x05a"), 99)


# --- Content that another value replaces, or that stands in a field that nobody knows -------------

MAP = KeyValue(key="info", value=any_value({"prompt": CANARY.decode()}))
ANSWER = KeyValue(value=any_value("kept"))
REPLACED = {
    "by another value": MAP.SerializeToString() + ANSWER.SerializeToString(),
    "in one value": b"\x0a\4info"
    + field(0x12, MAP.value.SerializeToString() + ANSWER.value.SerializeToString()),
    "in an array": b"\x0a\4info"
    + field(
        0x12,
        field(0x2A, field(0x0A, MAP.value.SerializeToString() + ANSWER.value.SerializeToString())),
    ),
}
UNKNOWN = {
    "bytes": b"\xfa\x3f" + bytes([len(CANARY)]) + CANARY,
    "fixed64": b"\xf9\x3f" + CANARY[:8],
    "group": b"\xfb\x3f\x0a" + bytes([len(CANARY)]) + CANARY + b"\xfc\x3f",
}


def places(inner: bytes) -> dict[str, bytes]:
    """Return requests that have these bytes in an attribute of everything that has attributes."""
    span, group = field(0x12, SPAN), field(0x12, field(0x12, SPAN))
    return {
        "resource": field(0x0A, field(0x0A, field(0x0A, inner)) + group),
        "scope": request(field(0x0A, field(0x1A, inner)) + span),
        "span": a_span(field(0x4A, inner)),
        "event": a_span(field(0x5A, field(0x1A, inner))),
        "link": a_span(field(0x6A, field(0x22, inner))),
    }


@pytest.mark.parametrize("inner", REPLACED.values(), ids=REPLACED)
def test_content_that_another_value_replaces_is_not_kept(inner: bytes) -> None:
    for place, body in places(inner).items():
        assert CANARY in body
        rows, _, kept = scanned(body, 2048)
        assert CANARY not in kept, place
        assert "kept" in str(rows.to_pylist()), place
        assert CANARY.decode() not in str(rows.to_pylist()), place


@pytest.mark.parametrize("unknown", UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_fields_are_not_kept_at_any_level(unknown: bytes) -> None:
    kept_value = b"\x0a\1k" + field(0x12, b"\x0a\4kept")
    bodies = places(kept_value + unknown) | {
        "request": request(field(0x12, SPAN + b"\x2a\4kept")) + unknown,
        "resource spans": field(0x0A, field(0x12, field(0x12, SPAN + b"\x2a\4kept")) + unknown),
        "resource itself": field(0x0A, field(0x0A, unknown))
        + request(field(0x12, SPAN + b"\x2a\4kept")),
        "scope spans": request(field(0x12, SPAN + b"\x2a\4kept") + unknown),
        "scope itself": request(field(0x12, SPAN + b"\x2a\4kept") + field(0x0A, unknown)),
        "span": a_span(b"\x2a\4kept" + unknown),
        "event": a_span(b"\x2a\4kept" + field(0x5A, unknown)),
        "link": a_span(b"\x2a\4kept" + field(0x6A, unknown)),
        "status": a_span(b"\x2a\4kept" + field(0x7A, unknown)),
        "value": a_span(attribute(b"\x0a\4kept" + unknown)),
        "array": a_span(attribute(field(0x2A, field(0x0A, b"\x0a\4kept") + unknown))),
        "element": a_span(attribute(field(0x2A, field(0x0A, b"\x0a\4kept" + unknown)))),
        "map": a_span(attribute(field(0x32, field(0x0A, kept_value) + unknown))),
        "pair": a_span(attribute(field(0x32, field(0x0A, kept_value + unknown)))),
    }
    for place, body in bodies.items():
        rows, _, kept = scanned(body, 2048)
        assert CANARY[:8] not in kept, place
        assert "kept" in str(rows.to_pylist()), place


# --- Room, and what is remembered -----------------------------------------------------------------


@settings(often, max_examples=40)
@given(st.lists(seeds, min_size=1, max_size=4), st.integers(32, 90))
def test_a_batch_of_many_requests_has_the_rows_of_each(many: list[int], limit: int) -> None:
    """Also with little room at first, after `take_back`, and when another batch has the reader."""
    bodies = [Writer(seed, 0.05).request() for seed in many]
    reader = SpanReader(limit)
    tiny, roomy = SpanBatch(reader, 16, 1), SpanBatch(reader, 2**18, 4096)
    for body in bodies:
        for batch in (tiny, roomy):
            kept, _ = batch.add(body, RECEIVED_NS)
            again = bytes(kept)
            mark = batch.mark()
            batch.add(again, RECEIVED_NS)
            with pytest.raises(Malformed):
                batch.add(body + b"\x0a\x05abc", RECEIVED_NS)
            batch.take_back(mark)
    expected = [row for body in bodies for row in scanned(body, limit)[0].to_pylist()]
    assert repr(rows_of(tiny).to_pylist()) == repr(expected)
    assert_equal(rows_of(roomy), rows_of(tiny))


def test_more_keys_than_are_remembered() -> None:
    """They are forgotten between two requests; those longer than the limit are cut and equal."""
    reader = SpanReader(64)
    batch = SpanBatch(reader, 16, 1)
    names = [f"{'k' * 70}{i}" if i % 3 == 0 else f"key-{i}" for i in range(9000)]
    for first in range(0, 9000, 900):
        body = b"".join(attribute(b"\x18\5", name.encode()) for name in names[first : first + 900])
        body += attribute(b"\x0a\6secret", b"gen_ai.prompt")
        kept, tally = batch.add(a_span(body), RECEIVED_NS)
        assert (tally.denied, tally.cut, tally.duplicate_keys) == (1, 300, 299)
        assert b"secret" not in bytes(kept)
    for index, row in enumerate(rows_of(batch)["attributes"].to_pylist()):
        found = [pair["key"] for pair in row]
        own = names[900 * index : 900 * index + 900]
        assert sorted(found) == sorted([n for n in own if len(n) <= 64] + ["k" * 64])


def test_keys_that_are_equal_once_repaired_or_cut_are_one() -> None:
    equal = [b"a\xff", b"a\xc3", "a\ufffd".encode()]
    pairs = b"".join(attribute(b"\x18" + bytes([i]), key) for i, key in enumerate(equal))
    rows, tally, _ = scanned(a_span(pairs), 64)
    (attributes,) = rows["attributes"].to_pylist()
    assert [(pair["key"], pair["int"]) for pair in attributes] == [("a\ufffd", 2)]
    assert (tally.repaired, tally.duplicate_keys) == (2, 2)


def test_the_number_of_a_request_begins_anew() -> None:
    """What was seen under the same number long ago is no duplicate."""
    reader = SpanReader(64)
    batch = SpanBatch(reader)
    one = a_span(attribute(b"\x18\1", b"a"))
    other = a_span(attribute(b"\x18\2", b"b") + attribute(b"\x18\3", b"b"))
    batch.add(one, RECEIVED_NS)
    number = reader.serial
    reader.serial = 2**31 - 1
    found = [batch.add(body, RECEIVED_NS)[1].duplicate_keys for body in (other, one, one)]
    assert (found, number, reader.serial) == ([1, 0, 0], 1, 2)
    assert [
        [(pair["key"], pair["int"]) for pair in row]
        for row in rows_of(batch)["attributes"].to_pylist()
    ] == [[("a", 1)], [("b", 3)], [("a", 1)], [("a", 1)]]
