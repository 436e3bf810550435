"""The payload that the collector's benchmarks send: its figures, and that copies of it differ."""

import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from perfledger.schema.attributes import CONTENT_KEYS, SPAN_ATTRIBUTES

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from fresh_requests import FreshRequests  # noqa: E402
from llm_payload import CHATS, STEPS, llm_requests  # noqa: E402
from reference_payload import SERVICES, figures, requests, spans_of  # noqa: E402

NOW_NS = 1_800_000_000_000_000_000


def test_figures_are_those_of_the_reference() -> None:
    found = figures(requests(12, seed=1))
    assert (found.spans_a_request, found.events, found.event_attributes) == (512, 2, 2)
    assert found.attributes == pytest.approx(12, abs=0.01)
    assert found.protobuf_bytes == pytest.approx(653, rel=0.02)
    assert found.gzip_bytes == pytest.approx(87, rel=0.02)


def test_a_seed_gives_the_same_bytes_and_no_request_twice() -> None:
    one, again, other = requests(3, 7), requests(3, 7), requests(3, 8)
    assert one == again
    assert len({*one, *other}) == 6
    assert llm_requests(2, 7) == llm_requests(2, 7) != llm_requests(2, 8)


def test_a_request_holds_four_services_of_traces_of_eight_nested_spans() -> None:
    (body,) = requests(1)
    groups = ExportTraceServiceRequest.FromString(body).resource_spans
    assert [sum(len(s.spans) for s in group.scope_spans) for group in groups] == [128] * 4
    names = [{a.key: a.value.string_value for a in g.resource.attributes} for g in groups]
    assert tuple(resource["service.name"] for resource in names) == SERVICES
    spans = {span.span_id: span for span in spans_of(body)}
    assert len(spans) == 512
    assert set(Counter(span.trace_id for span in spans.values()).values()) == {8}
    for span in spans.values():
        assert_inside_its_parent(span, spans)


def assert_inside_its_parent(span: Span, spans: dict[bytes, Span]) -> None:
    assert span.start_time_unix_nano <= span.end_time_unix_nano
    assert all(
        span.start_time_unix_nano <= event.time_unix_nano <= span.end_time_unix_nano
        for event in span.events
    )
    if span.parent_span_id:
        parent = spans[span.parent_span_id]
        assert parent.trace_id == span.trace_id
        assert parent.start_time_unix_nano <= span.start_time_unix_nano
        assert span.end_time_unix_nano <= parent.end_time_unix_nano


def test_attributes_have_all_types_some_columns_and_no_content() -> None:
    attributes = [one for span in spans_of(requests(1)[0]) for one in span.attributes]
    kinds = {one.value.WhichOneof("value") for one in attributes}
    assert kinds == {"string_value", "int_value", "double_value", "bool_value", "array_value"}
    keys = {one.key for one in attributes}
    promoted = {one.name for one in SPAN_ATTRIBUTES if one.column}
    assert {"perfledger.tenant", "gen_ai.request.model"} <= keys & promoted
    assert not keys & CONTENT_KEYS
    assert "gen_ai.operation.name" not in keys


def test_some_values_are_new_in_each_trace_and_most_come_from_short_lists() -> None:
    spans = [span for body in requests(4) for span in spans_of(body)]
    values: dict[str, set[bytes]] = {}
    for span in spans:
        for one in span.attributes:
            values.setdefault(one.key, set()).add(one.value.SerializeToString())
    traces = len({span.trace_id for span in spans})
    assert len(values["app.request.id"]) == len(values["perfledger.session"]) == traces
    few = [key for key, different in values.items() if len(different) <= 40]
    assert len(few) > len(values) * 2 / 3


def test_a_batch_of_the_runtime_holds_chats_and_the_steps_that_computed_them() -> None:
    spans = spans_of(llm_requests(1)[0])
    assert len(spans) == 512
    names = Counter(span.name for span in spans)
    steps = [span for span in spans if span.name.endswith("_step")]
    assert (names["chat"], names["prefill"], len(steps)) == (CHATS, 2 * CHATS, STEPS)
    roots = {(s.trace_id, s.span_id) for s in spans if s.kind == Span.SPAN_KIND_SERVER}
    assert {(one.trace_id, one.span_id) for step in steps for one in step.links} == roots
    ids = {span.span_id for span in spans}
    assert all(span.parent_span_id in ids for span in spans if span.parent_span_id)


@pytest.mark.parametrize("generate", [requests, llm_requests])
def test_fresh_copies_differ_in_ids_and_times_alone(generate: object) -> None:
    (body,) = generate(1)  # type: ignore[operator]
    fresh = FreshRequests.of(body, seed=5)
    copies = [bytes(fresh.make(number, NOW_NS + number)) for number in range(4)]
    assert bytes(fresh.make(2, NOW_NS + 2)) == copies[2]
    seen_ids, seen_traces = set(), set()
    for number, copy in enumerate(copies):
        spans = spans_of(copy)
        ids = [int.from_bytes(span.span_id, "little") for span in spans]
        assert np.array_equal(np.array(ids, np.uint64), fresh.span_ids(number))
        assert sorted({span.trace_id for span in spans}) == sorted(fresh.trace_ids(number))
        assert max(span.end_time_unix_nano for span in spans) == NOW_NS + number
        assert blanked(copy) == blanked(body)
        seen_ids.update(ids)
        seen_traces.update(fresh.trace_ids(number))
    assert len(seen_ids) == 4 * 512
    assert len(seen_traces) == 4 * len(fresh.trace_ids(0))


def blanked(body: bytes) -> bytes:
    """Return a request with what is to differ made alike, its structure kept."""
    request = ExportTraceServiceRequest.FromString(body)
    spans = [s for g in request.resource_spans for scope in g.scope_spans for s in scope.spans]
    places: dict[bytes, bytes] = {}
    newest_ns = max(span.end_time_unix_nano for span in spans)
    for span in spans:
        for one in (span, *span.links):
            for field in {"trace_id", "span_id", "parent_span_id"} & {f.name for f in fields(one)}:
                value = getattr(one, field)
                setattr(one, field, places.setdefault(value, b"%d" % len(places)))
        span.start_time_unix_nano = newest_ns - span.start_time_unix_nano
        span.end_time_unix_nano = newest_ns - span.end_time_unix_nano
        for event in span.events:
            event.time_unix_nano = newest_ns - event.time_unix_nano
        for one in span.attributes:
            if one.key in ("app.request.id", "perfledger.session", "gen_ai.response.id"):
                text = one.value.string_value
                assert int(text[-16:], 16) >= 0
                one.value.string_value = text[:-16]
    return bytes(request.SerializeToString())


def fields(message: object) -> list[object]:
    return [field for field, _ in message.ListFields()]  # type: ignore[attr-defined]


def test_ids_never_repeat_over_numbers_and_seeds() -> None:
    (body,) = requests(1)
    words = [
        FreshRequests.of(body, seed).span_ids(number)
        for seed in (0, 1, 65_535)
        for number in (0, 1, 2**32 - 1)
    ]
    assert len(np.unique(np.concatenate(words))) == 9 * 512
    with pytest.raises(ValueError, match="too large"):
        FreshRequests.of(body, 65_536).make(0, time.time_ns())
