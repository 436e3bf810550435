"""Any OTLP request gives rows that are valid under the schema, and counts what it rejects."""

import json

import polars as pl
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status
from otlp_messages import LOG_RECORDS, METRICS, RECEIVED_NS, TRACES, Decoded, any_value, decode

from perfledger.collectors.otlp_rows import SIGNALS, UndecodableRequest
from perfledger.schema.columns import Table
from perfledger.schema.tables import LOGS, POINTS, SPANS

LATEST = 2**63 - 1

texts = st.text(max_size=12)
keys = st.one_of(
    texts,
    st.sampled_from(
        [
            "gen_ai.usage.input_tokens",
            "gen_ai.request.model",
            "perfledger.rank",
            "perfledger.phase",
            "perfledger.tokens",
            "gen_ai.prompt",
            "service.name",
            "messages",
        ]
    ),
)
int64s = st.one_of(st.integers(-(2**63), LATEST), st.sampled_from([-(2**31) - 1, 2**31, LATEST]))
uint64s = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, LATEST, 2**63, 2**64 - 1]))
uint32s = st.integers(0, 2**32 - 1)
int32s = st.integers(-(2**31), 2**31 - 1)
leaves = st.one_of(st.none(), st.booleans(), int64s, st.floats(), texts, st.binary(max_size=12))
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
attribute_lists = st.lists(
    st.builds(lambda key, value: KeyValue(key=key, value=any_value(value)), keys, values),
    max_size=4,
)


def ids(length: int) -> st.SearchStrategy[bytes]:
    good = st.binary(min_size=length, max_size=length)
    return st.one_of(good, good, good, st.binary(max_size=20), st.just(bytes(length)))


spans = st.builds(
    Span,
    trace_id=ids(16),
    span_id=ids(8),
    parent_span_id=st.one_of(st.just(b""), ids(8)),
    name=texts,
    kind=int32s | st.integers(0, 5),
    flags=uint32s,
    trace_state=texts,
    start_time_unix_nano=uint64s,
    end_time_unix_nano=uint64s,
    attributes=attribute_lists,
    dropped_attributes_count=uint32s,
    events=st.lists(
        st.builds(Span.Event, time_unix_nano=uint64s, name=texts, attributes=attribute_lists),
        max_size=2,
    ),
    links=st.lists(
        st.builds(Span.Link, trace_id=ids(16), span_id=ids(8), attributes=attribute_lists),
        max_size=2,
    ),
    status=st.builds(Status, code=int32s | st.integers(0, 2), message=texts),
)
trace_requests = st.builds(
    ExportTraceServiceRequest,
    resource_spans=st.lists(
        st.builds(
            ResourceSpans,
            resource=st.builds(Resource, attributes=attribute_lists),
            scope_spans=st.lists(
                st.builds(
                    ScopeSpans,
                    scope=st.builds(InstrumentationScope, name=texts, attributes=attribute_lists),
                    spans=st.lists(spans, max_size=4),
                ),
                max_size=2,
            ),
        ),
        max_size=2,
    ),
)
number_points = st.builds(
    NumberDataPoint,
    as_int=int64s,
    time_unix_nano=uint64s,
    start_time_unix_nano=uint64s,
    flags=uint32s,
    attributes=attribute_lists,
)
histogram_points = st.builds(
    HistogramDataPoint,
    count=uint64s,
    sum=st.none() | st.floats(),
    explicit_bounds=st.lists(st.floats(), max_size=3),
    bucket_counts=st.lists(uint64s, max_size=4),
    time_unix_nano=uint64s,
)
exponential_points = st.builds(
    ExponentialHistogramDataPoint,
    scale=int32s | st.integers(-12, 20),
    zero_count=uint64s,
    count=uint64s,
    positive=st.builds(
        ExponentialHistogramDataPoint.Buckets,
        offset=int32s,
        bucket_counts=st.lists(uint64s, max_size=3),
    ),
)
metric_requests = st.builds(
    lambda metrics: ExportMetricsServiceRequest(
        resource_metrics=[ResourceMetrics(scope_metrics=[ScopeMetrics(metrics=metrics)])]
    ),
    st.lists(
        st.one_of(
            st.builds(
                Metric,
                name=texts,
                gauge=st.builds(Gauge, data_points=st.lists(number_points, max_size=3)),
            ),
            st.builds(
                Metric,
                name=texts,
                histogram=st.builds(
                    Histogram,
                    aggregation_temporality=int32s,
                    data_points=st.lists(histogram_points, max_size=3),
                ),
            ),
            st.builds(
                Metric,
                name=texts,
                exponential_histogram=st.builds(
                    ExponentialHistogram, data_points=st.lists(exponential_points, max_size=3)
                ),
            ),
        ),
        max_size=3,
    ),
)
any_request = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def assert_valid(decoded: Decoded, table: Table) -> None:
    assert decoded.rows.schema.equals(table.arrow())
    decoded.rows.validate(full=True)
    for column in table.columns:
        assert not column.required or decoded.rows[column.name].null_count == 0
    frame = pl.DataFrame(decoded.rows)
    assert len(frame) == decoded.rows.num_rows


@any_request
@given(trace_requests, st.integers(1, 64))
def test_any_trace_request_gives_valid_rows_and_counts_the_rest(
    request: ExportTraceServiceRequest, max_value_bytes: int
) -> None:
    decoded = decode(TRACES, request.SerializeToString(), RECEIVED_NS, max_value_bytes)
    sent = sum(
        len(scoped.spans) for group in request.resource_spans for scoped in group.scope_spans
    )
    assert decoded.rows.num_rows + decoded.rejected == decoded.tally.items == sent
    assert_valid(decoded, SPANS)
    frame = pl.DataFrame(decoded.rows)
    assert frame.filter(pl.col("end_ns") < pl.col("start_ns")).is_empty()
    pairs = frame.select(pl.col("attributes").explode(empty_as_null=False)).unnest("attributes")
    assert (pairs["text"].str.len_bytes().max() or 0) <= max_value_bytes
    for text in pairs["json"].drop_nulls():
        json.loads(text)
    told_rejections = ExportTraceServiceResponse.FromString(decoded.response()).partial_success
    assert told_rejections.rejected_spans == decoded.rejected


@any_request
@given(metric_requests)
def test_any_metric_request_gives_valid_rows_and_counts_the_rest(
    request: ExportMetricsServiceRequest,
) -> None:
    decoded = decode(METRICS, request.SerializeToString(), RECEIVED_NS)
    assert decoded.rows.num_rows + decoded.rejected == decoded.tally.items
    assert_valid(decoded, POINTS)


@any_request
@given(st.lists(st.builds(LogRecord, time_unix_nano=uint64s, severity_number=int32s), max_size=3))
def test_any_log_request_gives_a_row_a_record(records: list[LogRecord]) -> None:
    request = ExportLogsServiceRequest(
        resource_logs=[ResourceLogs(scope_logs=[ScopeLogs(log_records=records)])]
    )
    decoded = decode(LOG_RECORDS, request.SerializeToString(), RECEIVED_NS)
    assert decoded.rows.num_rows == decoded.tally.items == len(records)
    assert_valid(decoded, LOGS)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(body: bytes) -> None:
    for signal in SIGNALS:
        try:
            decoded = decode(signal, body, RECEIVED_NS)
        except UndecodableRequest as error:
            assert signal.name in error.what
        else:
            assert decoded.rows.num_rows + decoded.rejected >= decoded.tally.items
