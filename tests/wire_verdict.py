"""What the compiled scanner must make of some bytes, by protobuf's own parser (span_oracle)."""

import dataclasses

import pyarrow as pa
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_messages import RECEIVED_NS
from span_oracle import oracle

from perfledger.collectors.attribute_values import Tally
from perfledger.collectors.lenient_messages import TRACES_REQUEST
from perfledger.collectors.wire.assemble import spans_table
from perfledger.collectors.wire.span_batch import Malformed, SpanBatch, SpanReader

BROKEN = "the span is not valid protobuf"


def scanned(body: bytes, limit: int) -> tuple[pa.Table, Tally, bytes]:
    """Return the rows in the order of the request, what was found, and the bytes kept."""
    batch = SpanBatch(SpanReader(limit), 64, 2)
    kept, tally = batch.add(body, RECEIVED_NS)
    return rows_of(batch), tally, bytes(kept)


def rows_of(batch: SpanBatch) -> pa.Table:
    """Return all rows of a batch, in the order in which they came."""
    rows = spans_table(batch, pa.array(range(batch.rows), pa.int32()).to_numpy())
    rows.validate(full=True)
    return rows


def assert_equal(found: pa.Table, expected: pa.Table) -> None:
    # By their text where NaN is in it.
    one, other = found.to_pylist(), expected.to_pylist()
    assert one == other or repr(one) == repr(other)


def assert_same(body: bytes, limit: int = 2048) -> bytes:
    """The rows and counts are the oracle's. Returns the bytes kept."""
    expected, expected_tally = oracle(body, RECEIVED_NS, limit)
    rows, tally, kept = scanned(body, limit)
    assert_equal(rows, expected)
    # Content that is not blanked in place is counted once for its whole request.
    assert tally.denied or not expected_tally.denied
    assert dataclasses.replace(tally, denied=0) == dataclasses.replace(expected_tally, denied=0)
    return kept


def assert_lasting(body: bytes, kept: bytes, limit: int) -> None:
    """What is kept gives the same rows once more, as after a crash, and denies nothing new."""
    again, _, kept_again = scanned(kept, limit)
    assert_equal(again, scanned(body, limit)[0])
    assert kept_again == kept


def assert_survived(body: bytes, limit: int = 2048) -> str:
    """Any bytes: the same rows, or refused, or without the spans that are broken. Says which.

    Nothing but Malformed is raised, and what is kept can be read by others.
    """
    if _is_read_by(ExportTraceServiceRequest, body):
        assert_lasting(body, assert_same(body, limit), limit)
        return "same"
    try:
        _, tally, kept = scanned(body, limit)
    except Malformed:
        assert not _is_read_by(TRACES_REQUEST, body)
        return "malformed"
    # Only a text that is not UTF-8 or an array's element is wrong, or else a span.
    assert bool(tally.rejected[BROKEN]) != _is_read_by(TRACES_REQUEST, body)
    assert_lasting(body, kept, limit)
    assert _is_read_by(TRACES_REQUEST, kept)
    return "broken" if tally.rejected[BROKEN] else "repaired"


def _is_read_by(parser: type, body: bytes) -> bool:
    try:
        parser.FromString(body)
    except DecodeError:
        return False
    return True
