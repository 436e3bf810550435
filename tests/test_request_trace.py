"""Trace context and traffic headers, read and refused."""

import asyncio
import re
from contextlib import suppress

import pytest

from perfledger.instrumented_runtime.openai_protocol import RefusedError
from perfledger.instrumented_runtime.request_trace import (
    RequestTrace,
    parse_traceparent,
    traffic_attributes,
)
from perfledger.schema.clocks import monotonic_ns

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_traceparent() -> None:
    ids = (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert parse_traceparent(PARENT) == ids
    assert parse_traceparent("cc" + PARENT[2:] + "-more") == ids


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        PARENT.upper(),
        PARENT + "-more",
        "ff" + PARENT[2:],
        PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        PARENT.replace("b7ad6b7169203331", "0" * 16),
        PARENT[:-3],
        PARENT + "\n",
    ],
)
def test_invalid_traceparents_are_ignored(header: str | None) -> None:
    assert parse_traceparent(header) is None


def test_a_trace_continues_the_callers() -> None:
    headers = [(b"traceparent", PARENT.encode()), (b"X-Request-ID", b"mine")]
    record = (trace := RequestTrace(7, "chat", headers, 1000)).record()
    assert trace.request_id == "mine"
    assert re.fullmatch(r"00-0af7651916cd43dd8448eb211c80319c-[0-9a-f]{16}-01", trace.traceparent)
    assert (record.request, record.name, record.start_ns) == (7, "chat", 1000)
    assert (record.trace_id, record.parent_span_id) == parse_traceparent(PARENT)
    assert f"{record.span_id:016x}" == trace.traceparent.split("-")[2]


@pytest.mark.parametrize(
    "error", [RefusedError("no"), asyncio.CancelledError(), RuntimeError("bug"), None], ids=repr
)
def test_a_stage_is_recorded_however_it_ends(error: BaseException | None) -> None:
    trace = RequestTrace(7, "chat", [], before_ns := monotonic_ns())
    with suppress(RefusedError, asyncio.CancelledError, RuntimeError), trace.span("template"):
        if error is not None:
            raise error
    record = trace.record()
    [span] = record.spans
    assert span.name == "template"
    assert before_ns <= span.start_ns <= span.end_ns <= record.end_ns


def test_a_trace_of_its_own() -> None:
    headers = [(b"traceparent", PARENT.encode())] * 2 + [(b"x-request-id", b"a b")]
    trace = RequestTrace(7, "chat", headers, 1000)
    assert trace.record().parent_span_id is None
    assert re.fullmatch(r"req-[0-9a-f]{32}", trace.request_id)


def test_traffic_headers() -> None:
    assert traffic_attributes(
        {
            "x-perfledger-tenant": "acme",
            "x-perfledger-class": "batch",
            "x-perfledger-session": "s:1/2",
            "x-perfledger-deadline-ms": "1500",
        }
    ) == {
        "perfledger.tenant": "acme",
        "perfledger.class": "batch",
        "perfledger.session": "s:1/2",
        "perfledger.deadline_ms": 1500,
    }
    assert traffic_attributes({}) == {}


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-perfledger-tenant", ""),
        ("x-perfledger-tenant", "a" * 129),
        ("x-perfledger-class", "two words"),
        ("x-perfledger-deadline-ms", "-5"),
        ("x-perfledger-deadline-ms", "0"),
        ("x-perfledger-deadline-ms", "soon"),
        ("x-perfledger-deadline-ms", "\u0665"),
    ],
)
def test_bad_traffic_headers_are_refused_by_name(header: str, value: str) -> None:
    with pytest.raises(RefusedError) as caught:
        traffic_attributes({header: value})
    assert (caught.value.code, caught.value.param) == ("invalid_header", header)
