"""The compiled scanner gives the rows that protobuf's own parser gives, and survives any bytes."""

import dataclasses

import pyarrow as pa
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_messages import RECEIVED_NS
from span_oracle import oracle
from test_otlp_any_request import trace_requests

from perfledger.collectors.attribute_values import Tally
from perfledger.collectors.wire.assemble import spans_table
from perfledger.collectors.wire.span_batch import SpanBatch, SpanReader

# Without the explaining phase, which traces every line.
often = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


def scanned(body: bytes, limit: int) -> tuple[pa.Table, Tally, bytes]:
    """Return the rows in the order of the request, what was found, and the bytes kept."""
    batch = SpanBatch(SpanReader(limit), 64, 2)
    kept, tally = batch.add(body, RECEIVED_NS)
    rows = spans_table(batch, pa.array(range(batch.rows), pa.int32()).to_numpy())
    rows.validate(full=True)
    return rows, tally, bytes(kept)


def assert_same(body: bytes, limit: int = 2048) -> bytes:
    expected, expected_tally = oracle(body, RECEIVED_NS, limit)
    rows, tally, kept = scanned(body, limit)
    assert rows.to_pylist() == expected.to_pylist() or repr(rows.to_pylist()) == repr(
        expected.to_pylist()
    )
    # Content that is not blanked in place is counted once for its whole request.
    assert tally.denied or not expected_tally.denied
    assert dataclasses.replace(tally, denied=0) == dataclasses.replace(expected_tally, denied=0)
    return kept


@often
@given(trace_requests, st.integers(1, 64))
def test_any_valid_request_gives_the_rows_of_the_official_parser(
    request: ExportTraceServiceRequest, limit: int
) -> None:
    kept = assert_same(request.SerializeToString(), limit)
    # What is kept gives the same rows once more, as after a crash, and denies nothing new.
    again, _, kept_again = scanned(kept, limit)
    assert repr(again.to_pylist()) == repr(
        scanned(request.SerializeToString(), limit)[0].to_pylist()
    )
    assert kept_again == kept
