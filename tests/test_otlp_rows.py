"""OTLP spans become rows: whole rows, every value kind, content denied, bad spans rejected."""

import base64
import json

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status
from otlp_messages import (
    PARENT_ID,
    RECEIVED_NS,
    SPAN_ID,
    TRACE_ID,
    TRACES,
    any_value,
    attributes_of,
    decode,
    decode_spans,
    kept,
    key_values,
    only_row,
    pair,
    span,
)

from perfledger.collectors.attribute_values import MAX_DEPTH
from perfledger.collectors.otlp_rows import SIGNALS, UndecodableRequest

LATEST = 2**63 - 1
CANARY = "canary-7f3a"


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
        "resource_attributes": json.dumps(
            {
                "host.name": "h",
                "otel.scope.lang": "py",
                "otel.resource.schema_url": "https://r",
                "otel.scope.schema_url": "https://s",
                "otel.resource.dropped_attributes_count": 2,
            },
            separators=(",", ":"),
        ),
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
        "kept_share": None,
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
        "resource_attributes": "{}",
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
    outer = json.loads(KEPT_OF_CONTENT["outer"]["json"])
    assert json.loads(row["resource_attributes"]) == {"outer": outer, "otel.scope.outer": outer}
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


def test_base64_of_long_bytes_in_an_array_is_cut() -> None:
    found = attributes_of({"a": [b"x" * 100]}, max_value_bytes=16)
    (text,) = json.loads(found["a"]["json"])
    assert base64.b64encode(b"x" * 100).decode().startswith(text) and 0 < len(text) <= 16
