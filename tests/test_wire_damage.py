"""Damaged and hostile requests of spans: no crash, no read out of bounds, no leak, bounded memory."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_messages import RECEIVED_NS
from test_wire_scanner import often, seeds
from wire_damage import damaged
from wire_forms import Writer
from wire_hostile import a_span, attribute, field, request
from wire_verdict import BROKEN, assert_equal, assert_survived, rows_of, scanned

from perfledger.collectors.wire.span_batch import Malformed, SpanBatch, SpanReader

FOLDER = Path(__file__).parent
CANARY = b"canary-2f9c1b"
SPAN = b"\x0a\x10" + b"t" * 16 + b"\x12\x08" + b"s" * 8


@settings(often, max_examples=1500)
@given(seeds, st.integers(32, 90))
def test_damaged_requests_are_refused_or_lose_the_broken_spans_only(seed: int, limit: int) -> None:
    assert_survived(damaged(seed), limit)


@settings(often, max_examples=300)
@given(st.binary(max_size=300), st.integers(32, 90))
def test_any_bytes_are_survived(body: bytes, limit: int) -> None:
    assert_survived(body, limit)


def child(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_nothing_behind_the_end_is_read() -> None:
    done = child("wire_damage.py", "0", "4000")
    assert done.returncode == 0, done.stderr[-500:]
    assert int(done.stdout) > 800
    assert child("wire_damage.py", "0", "1", "overread").returncode == -signal.SIGSEGV


# --- Broken spans and envelopes -------------------------------------------------------------------


@pytest.mark.parametrize("broken", [b"\x0a\x11abc", b"\xff", b"\x0e", b"\x4a\x03\x12\x05\x0a", b"\0"])
@pytest.mark.parametrize("beside", [b"", b"\xa3\x01\xa4\x01"], ids=["alone", "beside a group"])
def test_a_broken_span_is_rejected_alone(broken: bytes, beside: bytes) -> None:
    spans = [SPAN + b"\x2a\1a", SPAN + broken + CANARY, SPAN + b"\x2a\1b" + beside]
    rows, tally, kept = scanned(request(b"".join(field(0x12, span) for span in spans)), 99)
    assert rows["name"].to_pylist() == ["a", "b"]
    assert (tally.items, tally.rejected) == (3, {BROKEN: 1})
    assert CANARY not in kept
    # Others can still read what is kept, and find the same two spans.
    message = ExportTraceServiceRequest.FromString(kept)
    assert [s.name for s in message.resource_spans[0].scope_spans[0].spans] == ["a", "b"]


@settings(often, max_examples=100)
@given(seeds)
def test_a_broken_envelope_is_refused(seed: int) -> None:
    body = Writer(seed).request()
    with pytest.raises(Malformed):
        scanned(body + b"\x0a\x05abc", 99)
    with pytest.raises(Malformed):
        scanned(body + field(0x0A, b"\x12\x7f"), 99)
    with pytest.raises(Malformed):
        scanned(body + field(0x0A, b"\x0a\x03\x0a\x05a"), 99)


# --- Content that another value replaces, or that stands in a field that nobody knows -------------

MAP_OF_CONTENT = b"\x32" + bytes([8 + 2 + len(CANARY) + 2]) + (
    b"\x0a" + bytes([6 + 4 + len(CANARY)]) + b"\x0a\x04\x69nfo"[:0]
    + b"\x0a\x06prompt"[:8] + b"\x12"[:0]
)
