"""The compiled scanner gives the rows that protobuf's own parser gives, and survives any bytes."""

import re

from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from test_otlp_any_request import trace_requests
from wire_forms import Writer
from wire_verdict import assert_lasting, assert_same, scanned

from perfledger.collectors.otlp_rows import TRACES, Outcome

# Without the explaining phase, which traces every line.
often = settings(
    max_examples=200,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
seeds = st.integers(0, 2**48)


@often
@given(trace_requests, st.integers(1, 64))
def test_any_valid_request_gives_the_rows_of_the_official_parser(
    request: ExportTraceServiceRequest, limit: int
) -> None:
    body = request.SerializeToString()
    assert_lasting(body, assert_same(body, limit), limit)


@settings(often, max_examples=600)
@given(seeds, st.sampled_from([0.0, 0.05, 0.15, 0.3]), st.booleans(), st.integers(32, 90))
def test_every_form_on_the_wire_gives_the_rows_of_the_official_parser(
    seed: int, oddity: float, content: bool, limit: int
) -> None:
    body = Writer(seed, oddity, content=content).request()
    ExportTraceServiceRequest.FromString(body)
    kept = assert_same(body, limit)
    assert_lasting(body, kept, limit)
    # A span that was rejected leaves nothing behind that another receiver would stumble over.
    ExportTraceServiceRequest.FromString(kept)


@settings(often, max_examples=200)
@given(seeds, st.integers(32, 90))
def test_texts_that_are_not_utf8_are_repaired_alone(seed: int, limit: int) -> None:
    body = Writer(seed, 0.05, bad_texts=0.3).request()
    assert_lasting(body, assert_same(body, limit), limit)
    _, tally, _ = scanned(body, limit)
    try:
        ExportTraceServiceRequest.FromString(body)
    except DecodeError:
        pass
    else:
        assert not tally.repaired
    message = Outcome.of(TRACES, tally).response().partial_success.error_message
    assert bool(tally.repaired) == bool(re.search(r"\d+ texts were not UTF-8", message))
