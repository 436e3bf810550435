"""OTLP metrics and logs become rows: every kind of point whole, log records without bodies."""

from collections import Counter

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    Exemplar,
    ExponentialHistogram,
    ExponentialHistogramDataPoint,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
    Summary,
    SummaryDataPoint,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from otlp_messages import (
    LOG_RECORDS,
    METRICS,
    RECEIVED_NS,
    SPAN_ID,
    TRACE_ID,
    Decoded,
    any_value,
    decode,
    key_values,
    only_row,
    pair,
)

CANARY = "canary-7f3a"


def decode_metrics(*metrics: Metric) -> Decoded:
    resource = Resource(
        attributes=key_values(
            {
                "service.name": "llm",
                "service.instance.id": "i",
                "perfledger.run.id": "r",
                "host": "h",
                "perfledger.clock.boot_id": "b",
            }
        )
    )
    request = ExportMetricsServiceRequest(
        resource_metrics=[
            ResourceMetrics(resource=resource, scope_metrics=[ScopeMetrics(metrics=metrics)])
        ]
    )
    return decode(METRICS, request.SerializeToString(), RECEIVED_NS)


def told(row: dict[str, object]) -> dict[str, object]:
    """Return what a row says beyond what all rows of these tests share."""
    shared = {
        "service_name": "llm",
        "service_instance_id": "i",
        "run_id": "r",
        "resource_attributes": '{"host":"h"}',
        "received_ns": RECEIVED_NS,
    }
    assert {key: row[key] for key in shared} == shared
    return {k: v for k, v in row.items() if k not in shared and v is not None and v != []}


TIMES = {"time_unix_nano": 20, "start_time_unix_nano": 10}


def test_gauges_and_sums_become_points() -> None:
    decoded = decode_metrics(
        Metric(
            name="queue",
            unit="{request}",
            gauge=Gauge(
                data_points=[
                    NumberDataPoint(as_int=3, attributes=key_values({"a": 1}), **TIMES),
                    NumberDataPoint(as_double=float("nan"), time_unix_nano=21),
                    NumberDataPoint(flags=1, as_int=9),
                ]
            ),
        ),
        Metric(
            name="tokens",
            sum=Sum(
                aggregation_temporality=2,
                is_monotonic=True,
                data_points=[NumberDataPoint(as_double=2.5, exemplars=[Exemplar()], **TIMES)],
            ),
        ),
    )
    gauge = {"name": "queue", "unit": "{request}", "kind": "gauge"}
    rows = decoded.rows.to_pylist()
    assert str(rows[1].pop("value")) == "nan"
    assert [told(row) for row in rows] == [
        {**gauge, "time_ns": 20, "start_ns": 10, "value": 3.0, "attributes": [pair("a", int=1)]},
        {**gauge, "time_ns": 21},
        {**gauge, "time_ns": RECEIVED_NS},
        {
            "name": "tokens",
            "kind": "sum",
            "temporality": "cumulative",
            "monotonic": True,
            "time_ns": 20,
            "start_ns": 10,
            "value": 2.5,
        },
    ]
    assert (decoded.tally.items, decoded.tally.exemplars_dropped) == (4, 1)


def test_histograms_are_kept_whole() -> None:
    explicit = HistogramDataPoint(
        count=6, sum=9.5, min=0.5, max=7.0, explicit_bounds=[1, 5], bucket_counts=[1, 2, 3], **TIMES
    )
    exponential = ExponentialHistogramDataPoint(
        count=7, scale=0, zero_count=1, time_unix_nano=20, sum=1.0
    )
    exponential.positive.offset, exponential.negative.offset = 1, 0
    exponential.positive.bucket_counts.extend([2, 3])
    exponential.negative.bucket_counts.extend([1])
    decoded = decode_metrics(
        Metric(
            name="ttft",
            unit="s",
            histogram=Histogram(aggregation_temporality=1, data_points=[explicit]),
        ),
        Metric(name="e", exponential_histogram=ExponentialHistogram(data_points=[exponential])),
    )
    assert [told(row) for row in decoded.rows.to_pylist()] == [
        {
            "name": "ttft",
            "unit": "s",
            "kind": "histogram",
            "temporality": "delta",
            "time_ns": 20,
            "start_ns": 10,
            "count": 6,
            "value": 9.5,
            "min": 0.5,
            "max": 7.0,
            "bounds": [1.0, 5.0],
            "bucket_counts": [1, 2, 3],
        },
        {
            "name": "e",
            "kind": "exponential_histogram",
            "time_ns": 20,
            "count": 7,
            "value": 1.0,
            # (-2, -1] mirrored, zero between, then (2, 4] and (4, 8].
            "bounds": [-2.0, -1.0, 2.0, 4.0, 8.0],
            "bucket_counts": [0, 1, 1, 2, 3, 0],
        },
    ]


def test_a_summary_has_a_row_and_one_for_each_quantile() -> None:
    point = SummaryDataPoint(count=4, sum=8.0, attributes=key_values({"a": 1}), time_unix_nano=20)
    point.quantile_values.add(quantile=0.5, value=1.5)
    decoded = decode_metrics(Metric(name="s", summary=Summary(data_points=[point])))
    shared = {"name": "s", "kind": "summary", "time_ns": 20}
    assert [told(row) for row in decoded.rows.to_pylist()] == [
        {**shared, "value": 8.0, "count": 4, "attributes": [pair("a", int=1)]},
        {**shared, "value": 1.5, "attributes": [pair("a", int=1), pair("quantile", double=0.5)]},
    ]
    assert decoded.tally.items == 1


def test_points_that_can_never_be_stored_are_rejected_alone() -> None:
    decoded = decode_metrics(
        Metric(name="", gauge=Gauge(data_points=[NumberDataPoint(as_int=1)])),
        Metric(name="late", gauge=Gauge(data_points=[NumberDataPoint(time_unix_nano=2**63)])),
        Metric(
            name="h",
            histogram=Histogram(
                data_points=[
                    HistogramDataPoint(explicit_bounds=[1], bucket_counts=[1]),
                    HistogramDataPoint(count=2**63),
                    HistogramDataPoint(bucket_counts=[1] * 10_001, explicit_bounds=[0] * 10_000),
                    HistogramDataPoint(explicit_bounds=[0] * 10_001),
                    HistogramDataPoint(count=1),
                ]
            ),
        ),
        Metric(name="nothing"),
    )
    assert decoded.rows["name"].to_pylist() == ["h"]
    assert decoded.tally.rejected == Counter(
        {
            "metric without a name": 1,
            "time_unix_nano is after the year 2262": 1,
            "a histogram has one bucket more than bounds": 1,
            "a count is beyond 2^63": 1,
            "a histogram has more than 10000 buckets": 2,
        }
    )
    assert decoded.tally.items == 7


@pytest.mark.parametrize("scale", [-(2**31), -1100, 0, 20, 2**31 - 1])
@pytest.mark.parametrize("offset", [-(2**31), 0, 2**31 - 1])
def test_absurd_exponential_histograms_have_ordered_bounds(scale: int, offset: int) -> None:
    point = ExponentialHistogramDataPoint(scale=scale, time_unix_nano=20)
    point.positive.offset = point.negative.offset = offset
    point.positive.bucket_counts.extend([1, 1])
    point.negative.bucket_counts.extend([1])
    row = only_row(
        decode_metrics(
            Metric(name="e", exponential_histogram=ExponentialHistogram(data_points=[point]))
        )
    )
    assert row["bounds"] == sorted(row["bounds"])
    assert len(row["bucket_counts"]) == len(row["bounds"]) + 1 == 6


def test_a_log_record_is_kept_without_its_body() -> None:
    records = [
        LogRecord(
            time_unix_nano=9,
            trace_id=TRACE_ID,
            span_id=SPAN_ID,
            severity_number=17,
            body=any_value({"content": CANARY}),
            event_name="gen_ai.choice",
            attributes=key_values({"code": 3, "exception.message": CANARY}),
        ),
        LogRecord(observed_time_unix_nano=8, trace_id=b"short"),
    ]
    resource = Resource(attributes=key_values({"service.name": "llm", "host": "h"}))
    request = ExportLogsServiceRequest(
        resource_logs=[ResourceLogs(resource=resource, scope_logs=[ScopeLogs(log_records=records)])]
    )
    decoded = decode(LOG_RECORDS, request.SerializeToString(), RECEIVED_NS)
    shared = {
        "body": None,
        "run_id": None,
        "service_name": "llm",
        "resource_attributes": '{"host":"h"}',
        "received_ns": RECEIVED_NS,
    }
    assert decoded.rows.to_pylist() == [
        {
            "time_ns": 9,
            "trace_id": TRACE_ID,
            "span_id": SPAN_ID,
            "severity": 17,
            "attributes": [pair("code", int=3), pair("event.name", text="gen_ai.choice")],
            **shared,
        },
        {
            "time_ns": 8,
            "trace_id": None,
            "span_id": None,
            "severity": 0,
            "attributes": [],
            **shared,
        },
    ]
    assert (decoded.tally.items, decoded.tally.denied) == (2, 2)
