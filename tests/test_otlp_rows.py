"""OTLP requests become rows: whole rows, every value kind, and no request that breaks it."""

import base64
import json
from collections import Counter
from collections.abc import Iterable

import polars as pl
import pytest
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
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
    KeyValueList,
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
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from perfledger.collectors.attribute_values import MAX_DEPTH
from perfledger.collectors.otlp_rows import SIGNALS, Decoded, UndecodableRequest, decode
from perfledger.schema.columns import Table
from perfledger.schema.tables import LOGS, POINTS, SPANS

TRACES, METRICS, LOG_RECORDS = SIGNALS
TRACE_ID, SPAN_ID, PARENT_ID = b"t" * 16, b"s" * 8, b"p" * 8
RECEIVED_NS = 7
LATEST = 2**63 - 1
CANARY = "canary-7f3a"


def any_value(value: object) -> AnyValue:
    """Write a Python value as OTLP does; None is the empty value."""
    match value:
        case None:
            return AnyValue()
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=value)
        case bytes():
            return AnyValue(bytes_value=value)
        case list():
            return AnyValue(array_value=ArrayValue(values=[any_value(item) for item in value]))
        case dict():
            return AnyValue(kvlist_value=KeyValueList(values=key_values(value)))
    raise TypeError(type(value))


def key_values(values: dict[str, object]) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(value)) for key, value in values.items()]


def span(**changes: object) -> Span:
    fields: dict[str, object] = {
        "trace_id": TRACE_ID,
        "span_id": SPAN_ID,
        "name": "chat",
        "start_time_unix_nano": 100,
        "end_time_unix_nano": 200,
    }
    return Span(**{**fields, **changes})


def decode_spans(spans: Iterable[Span], **limits: int) -> Decoded:
    request = ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=spans)])]
    )
    return decode(TRACES, request.SerializeToString(), RECEIVED_NS, **limits)


def only_row(decoded: Decoded) -> dict[str, object]:
    (row,) = decoded.rows.to_pylist()
    return row


def attributes_of(values: dict[str, object], **limits: int) -> dict[str, object]:
    """Send attributes on a span and return those of its row, without their empty fields."""
    return kept(only_row(decode_spans([span(attributes=key_values(values))], **limits)))


def kept(row: dict[str, object], column: str = "attributes") -> dict[str, object]:
    pairs = row[column]
    assert isinstance(pairs, list)
    values = {}
    for pair in pairs:
        filled = {kind: v for kind, v in pair.items() if kind != "key" and v is not None}
        assert len(filled) <= 1
        values[pair["key"]] = filled
    return values


def pair(key: str, **value: object) -> dict[str, object]:
    empty = dict.fromkeys(("text", "int", "double", "bool", "bytes", "json"))
    return {"key": key, **empty, **value}


def test_a_span_becomes_a_whole_row() -> None:
    request = ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=Resource(
                    attributes=key_values(
                        {
                            "service.name": "llm",
                            "service.instance.id": "i-1",
                            "perfledger.run.id": "run-1",
                            "perfledger.clock.boot_id": "boot",
                            "host.name": "h",
                        }
                    ),
                    dropped_attributes_count=2,
                ),
                schema_url="https://r",
                scope_spans=[
                    ScopeSpans(
                        scope=InstrumentationScope(
                            name="perfledger.runtime",
                            version="1",
                            attributes=key_values({"lang": "py"}),
                        ),
                        schema_url="https://s",
                        spans=[
                            Span(
                                trace_id=TRACE_ID,
                                span_id=SPAN_ID,
                                parent_span_id=PARENT_ID,
                                trace_state="a=b",
                                flags=0x301,
                                name="chat",
                                kind=Span.SPAN_KIND_SERVER,
                                start_time_unix_nano=1_700_000_000_000_000_001,
                                end_time_unix_nano=1_700_000_000_000_000_009,
                                attributes=key_values(
                                    {
                                        "gen_ai.operation.name": "chat",
                                        "gen_ai.request.model": "m",
                                        "gen_ai.usage.input_tokens": 12,
                                        "gen_ai.usage.cache_read.input_tokens": 4,
                                        "gen_ai.usage.output_tokens": 3,
                                        "gen_ai.usage.reasoning.output_tokens": 1,
                                        "error.type": "timeout",
                                        "perfledger.tenant": "acme",
                                        "perfledger.class": "batch",
                                        "perfledger.session": "s1",
                                        "perfledger.deadline_ms": 900,
                                        "perfledger.status": "aborted",
                                        "perfledger.ttfc_ns": 55,
                                        "perfledger.reason": "client_disconnect",
                                        "perfledger.tokens": 6,
                                        "perfledger.replica": "0",
                                        "perfledger.rank": 1,
                                        "perfledger.step.seq": 8,
                                        "perfledger.step.width": 2,
                                    }
                                ),
                                dropped_attributes_count=1,
                                events=[
                                    Span.Event(
                                        time_unix_nano=5, name="e", attributes=key_values({"k": 1})
                                    )
                                ],
                                dropped_events_count=3,
                                links=[
                                    Span.Link(
                                        trace_id=b"l" * 16,
                                        span_id=b"k" * 8,
                                        trace_state="x=y",
                                        attributes=key_values(
                                            {
                                                "perfledger.phase": "decode",
                                                "perfledger.tokens": 1,
                                                "other": True,
                                            }
                                        ),
                                    )
                                ],
                                dropped_links_count=4,
                                status=Status(code=Status.STATUS_CODE_ERROR, message="too slow"),
                            )
                        ],
                    )
                ],
            )
        ]
    )
    decoded = decode(TRACES, request.SerializeToString(), RECEIVED_NS)
    assert only_row(decoded) == {
        "trace_id": TRACE_ID,
        "span_id": SPAN_ID,
        "parent_span_id": PARENT_ID,
        "name": "chat",
        "kind": "server",
        "start_ns": 1_700_000_000_000_000_001,
        "end_ns": 1_700_000_000_000_000_009,
        "time_repaired": False,
        "status": "error",
        "status_message": "too slow",
        "run_id": "run-1",
        "service_name": "llm",
        "service_instance_id": "i-1",
        "boot_id": "boot",
        "scope_name": "perfledger.runtime",
        "scope_version": "1",
        "operation": "chat",
        "model": "m",
        "input_tokens": 12,
        "cached_tokens": 4,
        "output_tokens": 3,
        "reasoning_tokens": 1,
        "error_type": "timeout",
        "outcome": "aborted",
        "tenant": "acme",
        "traffic_class": "batch",
        "session": "s1",
        "deadline_ms": 900,
        "ttfc_ns": 55,
        "reason": "client_disconnect",
        "tokens": 6,
        "replica": "0",
        "rank": 1,
        "step_seq": 8,
        "attributes": [
            pair("perfledger.step.width", int=2),
            pair("otel.dropped_attributes_count", int=1),
            pair("otel.dropped_events_count", int=3),
            pair("otel.dropped_links_count", int=4),
        ],
        "resource_attributes": [
            pair("host.name", text="h"),
            pair("otel.scope.lang", text="py"),
            pair("otel.resource.schema_url", text="https://r"),
            pair("otel.scope.schema_url", text="https://s"),
            pair("otel.resource.dropped_attributes_count", int=2),
        ],
        "events": [{"time_ns": 5, "name": "e", "attributes": [pair("k", int=1)]}],
        "links": [
            {
                "trace_id": b"l" * 16,
                "span_id": b"k" * 8,
                "phase": "decode",
                "tokens": 1,
                "attributes": [pair("other", bool=True), pair("w3c.tracestate", text="x=y")],
            }
        ],
        "trace_state": "a=b",
        "flags": 0x301,
        "values_cut": 0,
        "received_ns": RECEIVED_NS,
    }
    assert decoded.response() == b""


def test_a_bare_span_is_an_internal_root_with_nothing_else() -> None:
    row = only_row(decode_spans([span()]))
    told = {key: value for key, value in row.items() if value not in (None, [])}
    assert told == {
        "trace_id": TRACE_ID,
        "span_id": SPAN_ID,
        "name": "chat",
        "kind": "internal",
        "start_ns": 100,
        "end_ns": 200,
        "time_repaired": False,
        "status": "unset",
        "flags": 0,
        "values_cut": 0,
        "received_ns": RECEIVED_NS,
    }


def test_every_value_kind_is_kept_as_its_type() -> None:
    values: dict[str, object] = {
        "text": "x",
        "int": -(2**63),
        "double": 0.5,
        "bool": False,
        "bytes": b"\x00\xff",
        "empty": None,
        "array": [1, "a", 2.5, True, None, b"\x01", float("nan"), float("-inf"), [], {"k": [1]}],
        "map": {"a": {"b": 1}, "ü": "ß"},
    }
    assert attributes_of(values) == {
        "text": {"text": "x"},
        "int": {"int": -(2**63)},
        "double": {"double": 0.5},
        "bool": {"bool": False},
        "bytes": {"bytes": b"\x00\xff"},
        "empty": {},
        "array": {"json": '[1,"a",2.5,true,null,"AQ==","NaN","-Infinity",[],{"k":[1]}]'},
        "map": {"json": '{"a":{"b":1},"ü":"ß"}'},
    }


def test_nan_and_infinity_stay_doubles() -> None:
    found = attributes_of({"nan": float("nan"), "inf": float("inf")})
    assert str(found) == "{'nan': {'double': nan}, 'inf': {'double': inf}}"


@pytest.mark.parametrize(
    ("key", "value", "stored"),
    [
        ("gen_ai.usage.input_tokens", "12", {"text": "12"}),
        ("gen_ai.usage.input_tokens", 12.0, {"double": 12.0}),
        ("gen_ai.usage.input_tokens", True, {"bool": True}),
        ("gen_ai.request.model", 7, {"int": 7}),
        ("perfledger.rank", 2**31, {"int": 2**31}),
        ("perfledger.tenant", ["a"], {"json": '["a"]'}),
        ("perfledger.tenant", None, {}),
    ],
)
def test_a_promoted_key_of_the_wrong_type_stays_an_attribute(
    key: str, value: object, stored: dict[str, object]
) -> None:
    row = only_row(decode_spans([span(attributes=key_values({key: value}))]))
    assert kept(row) == {key: stored}
    assert {row[column] for column in ("input_tokens", "model", "rank", "tenant")} == {None}


def test_of_equal_keys_the_last_wins_and_is_counted() -> None:
    twice = key_values({"a": 1}) + key_values({"a": "x", "b": {"k": 1}})
    twice[-1].value.kvlist_value.values.append(KeyValue(key="k", value=any_value(2)))
    decoded = decode_spans([span(attributes=twice)])
    assert kept(only_row(decoded)) == {"a": {"text": "x"}, "b": {"json": '{"k":2}'}}
    assert decoded.tally.duplicate_keys == 2


def test_long_values_are_cut_to_whole_characters_and_counted_everywhere() -> None:
    long = "ü" * 40
    attributes = key_values({"text": long, "bytes": b"b" * 65, "exact": "e" * 64, "k" * 70: 1})
    decoded = decode_spans(
        [
            span(
                name=long + "n",
                trace_state=long,
                attributes=attributes,
                events=[Span.Event(name=long, attributes=key_values({"e": long}))],
                links=[Span.Link(attributes=key_values({"perfledger.phase": long}))],
            )
        ],
        max_value_bytes=64,
    )
    row = only_row(decoded)
    cut = "ü" * 32
    assert (row["name"], row["trace_state"]) == (cut, cut)
    assert kept(row) == {
        "text": {"text": cut},
        "bytes": {"bytes": b"b" * 64},
        "exact": {"text": "e" * 64},
        "k" * 64: {"int": 1},
    }
    assert row["events"] == [{"time_ns": None, "name": cut, "attributes": [pair("e", text=cut)]}]
    assert row["links"] == [
        {"trace_id": None, "span_id": None, "phase": cut, "tokens": None, "attributes": []}
    ]
    assert row["values_cut"] == decoded.tally.cut == 8


def test_a_long_array_or_map_loses_its_tail_and_stays_json() -> None:
    values = {"array": list(range(1000)), "map": {f"k{i}": "v" * 9 for i in range(100)}}
    decoded = decode_spans([span(attributes=key_values(values))], max_value_bytes=100)
    found = kept(only_row(decoded))
    array, mapped = (json.loads(found[key]["json"]) for key in ("array", "map"))
    assert array == list(range(len(array))) and 20 < len(array) < 50
    assert [*mapped] == [f"k{i}" for i in range(len(mapped))] and 3 < len(mapped) < 9
    assert [*mapped.values()][:-1] == ["v" * 9] * (len(mapped) - 1)
    assert all(len(found[key]["json"]) <= 120 for key in found)
    assert decoded.tally.cut == 3  # two tails, and the last text kept


def test_a_resource_value_that_was_cut_counts_for_each_of_its_rows_and_once_in_all() -> None:
    request = ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=Resource(attributes=key_values({"host": "h" * 100})),
                scope_spans=[ScopeSpans(spans=[span(), span(span_id=b"2" * 8)])],
            )
        ]
    )
    decoded = decode(TRACES, request.SerializeToString(), RECEIVED_NS, max_value_bytes=10)
    assert decoded.rows["values_cut"].to_pylist() == [1, 1]
    assert decoded.tally.cut == 1


def test_nesting_is_cut_at_the_depth_limit() -> None:
    value: object = "leaf"
    for _ in range(MAX_DEPTH + 3):
        value = [value]
    decoded = decode_spans([span(attributes=key_values({"deep": value}))])
    assert kept(only_row(decoded)) == {"deep": {"json": "[" * MAX_DEPTH + "null" + "]" * MAX_DEPTH}}
    assert decoded.tally.cut == 1


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (100, 200, (100, 200, False)),
        (100, 100, (100, 100, False)),
        (100, 99, (100, 100, True)),
        (100, 0, (100, 100, True)),
        (100, 2**64 - 1, (100, 100, True)),
        (0, 100, (100, 100, True)),
        (0, 0, (0, 0, True)),
        (0, 2**64 - 1, (0, 0, True)),
        (LATEST, LATEST, (LATEST, LATEST, False)),
    ],
)
def test_a_duration_is_never_negative(
    start: int, end: int, expected: tuple[int, int, bool]
) -> None:
    row = only_row(decode_spans([span(start_time_unix_nano=start, end_time_unix_nano=end)]))
    assert (row["start_ns"], row["end_ns"], row["time_repaired"]) == expected


def test_a_bad_span_is_rejected_alone_and_the_answer_says_why() -> None:
    bad = [
        span(trace_id=b""),
        span(trace_id=bytes(16)),
        span(trace_id=b"t" * 15),
        span(span_id=b"s" * 9),
        span(span_id=bytes(8)),
        span(parent_span_id=b"p"),
        span(start_time_unix_nano=2**63),
    ]
    decoded = decode_spans([*bad, span(parent_span_id=bytes(8))])
    row = only_row(decoded)
    assert (row["span_id"], row["parent_span_id"]) == (SPAN_ID, None)
    assert (decoded.tally.items, decoded.rejected) == (8, 7)
    answer = ExportTraceServiceResponse.FromString(decoded.response()).partial_success
    assert answer.rejected_spans == 7
    assert answer.error_message == (
        "3: trace_id is not 16 bytes, or all zero; 2: span_id is not 8 bytes, or all zero; "
        "1: parent_span_id is not 8 bytes; 1: start_time_unix_nano is after the year 2262"
    )


def test_unknown_enum_numbers_are_read_as_unset() -> None:
    kinds = [
        only_row(decode_spans([span(kind=number, status=Status(code=number))]))
        for number in (0, 1, 5, 9, -1)
    ]
    assert [(row["kind"], row["status"]) for row in kinds] == [
        ("internal", "unset"),
        ("internal", "ok"),
        ("consumer", "unset"),
        ("internal", "unset"),
        ("internal", "unset"),
    ]


CONTENT = {
    "gen_ai.input.messages": CANARY,
    "gen_ai.prompt.0.content": CANARY,
    "GEN_AI.Completion": CANARY,
    "llm.output_messages.0.message.content": [CANARY],
    "ai.response.text": CANARY.encode(),
    "prompt": {"x": CANARY},
    "outer": {
        "gen_ai": {"prompt": CANARY, "usage": 1},
        "messages": [{"role": CANARY}],
        "deep": [[{"request": {"gen_ai.input.messages": CANARY, "kept": 2}}]],
    },
    "token_ids": [1, 2],
    "exception.message": CANARY,
}
KEPT_OF_CONTENT = {
    "outer": {"json": '{"gen_ai":{"usage":1},"deep":[[{"request":{"kept":2}}]]}'},
}
DENIED_OF_CONTENT = 11


def test_content_is_denied_in_every_place_of_a_span() -> None:
    content = key_values(CONTENT)
    request = ExportTraceServiceRequest(
        resource_spans=[
            ResourceSpans(
                resource=Resource(attributes=content),
                scope_spans=[
                    ScopeSpans(
                        scope=InstrumentationScope(attributes=content),
                        spans=[
                            span(
                                attributes=content,
                                events=[Span.Event(name="exception", attributes=content)],
                                links=[Span.Link(attributes=content)],
                                status=Status(code=2, message=f"ValueError: {CANARY}"),
                            )
                        ],
                    )
                ],
            )
        ]
    )
    decoded = decode(TRACES, request.SerializeToString(), RECEIVED_NS)
    row = only_row(decoded)
    assert CANARY not in str(row)
    assert kept(row) == KEPT_OF_CONTENT
    assert kept(row, "resource_attributes") == {
        **KEPT_OF_CONTENT,
        "otel.scope.outer": KEPT_OF_CONTENT["outer"],
    }
    assert kept(row["events"][0]) == KEPT_OF_CONTENT
    assert kept(row["links"][0]) == KEPT_OF_CONTENT
    assert row["status_message"] is None
    assert decoded.tally.denied == 5 * DENIED_OF_CONTENT + 1


def test_a_status_message_without_an_exception_is_kept_but_short() -> None:
    row = only_row(decode_spans([span(status=Status(code=2, message="m" * 1000))]))
    assert row["status_message"] == "m" * 256


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
@pytest.mark.parametrize("body", [b"\xff", b"\x0a\x05abc", b"\x0a\x04\x0a\x02\xff\xff", b"{}"])
def test_bytes_that_are_no_request_are_undecodable(signal: object, body: bytes) -> None:
    with pytest.raises(UndecodableRequest, match="not an OTLP .* request"):
        decode(signal, body)


@pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)
def test_an_empty_request_is_a_success_without_rows(signal: object) -> None:
    decoded = decode(signal, b"")
    assert (decoded.rows.num_rows, decoded.tally.items, decoded.response()) == (0, 0, b"")


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
        "resource_attributes": [pair("host", text="h")],
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
            "a histogram has more than 10000 buckets": 1,
        }
    )
    assert decoded.tally.items == 6


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
        "resource_attributes": [pair("host", text="h")],
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


# --- Any request ------------------------------------------------------------------------

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


def test_base64_of_long_bytes_in_an_array_is_cut() -> None:
    found = attributes_of({"a": [b"x" * 100]}, max_value_bytes=16)
    (text,) = json.loads(found["a"]["json"])
    assert base64.b64encode(b"x" * 100).decode().startswith(text) and 0 < len(text) <= 16
