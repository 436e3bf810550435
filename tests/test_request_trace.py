"""Trace context read, and what a request's record holds."""

import asyncio
import re
from collections.abc import Callable
from contextlib import suppress

import pytest

from perfledger.instrumented_runtime.openai_protocol import RefusedError
from perfledger.instrumented_runtime.request_trace import RequestTrace, parse_traceparent
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


def test_how_requests_end() -> None:
    def ended(end: Callable[[RequestTrace], None]) -> tuple[str, dict[str, object]]:
        trace = RequestTrace(7, "chat", [], 1000)
        end(trace)
        record = trace.record()
        return record.outcome, {**record.attributes} | {"gen_ai.operation.name": None}

    finish, reason = "gen_ai.response.finish_reasons", "perfledger.reason"
    nothing = {"gen_ai.operation.name": None}
    assert ended(lambda trace: trace.answered(["stop", "length"])) == (
        "ok",
        nothing | {finish: ["stop", "length"]},
    )
    assert ended(lambda trace: trace.refused("invalid_value")) == (
        "refused",
        nothing | {"error.type": "invalid_value"},
    )
    assert ended(lambda trace: trace.refused("shed", "shed")) == (
        "refused",
        nothing | {"error.type": "shed", reason: "shed"},
    )
    assert ended(lambda trace: trace.failed("client_disconnect")) == (
        "aborted",
        nothing | {finish: ["abort"], reason: "client_disconnect"},
    )
    assert ended(lambda trace: trace.failed("out_of_memory")) == (
        "error",
        nothing | {finish: ["abort"], reason: "out_of_memory", "error.type": "out_of_memory"},
    )
