"""The trace file: whole events for a small trace, and nesting for any trace."""

import json
from collections import defaultdict
from pathlib import Path

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.dashboards.perfetto import ENGINE_PID, REQUESTS_PID, trace_events, write_trace
from perfledger.schema.tables import SPANS, STEPS

TRACE, ROOT = b"t" * 16, b"r" * 8


def frame(table: object, rows: list[dict[str, object]]) -> pl.DataFrame:
    made = pl.from_arrow(table.from_rows(rows))  # type: ignore[attr-defined]
    assert isinstance(made, pl.DataFrame)
    return made


def span(name: str, start_ns: int, end_ns: int, **more: object) -> dict[str, object]:
    row: dict[str, object] = {"trace_id": TRACE, "span_id": name.encode().ljust(8)[:8]}
    row |= {"name": name, "kind": "internal", "start_ns": start_ns, "end_ns": end_ns}
    return row | {"received_ns": 0} | more


STEP: dict[str, object] = {
    "replica": "0",
    "rank": 0,
    "step_seq": 7,
    "trace_id": b"e" * 16,
    "span_id": b"s" * 8,
    "kind": "prefill_step",
    "start_ns": 1_500,
    "schedule_end_ns": 1_600,
    "sample_start_ns": 1_800,
    "sample_end_ns": 1_900,
    "end_ns": 2_000,
    "width": 1,
    "prefill_tokens": 5,
    "decode_tokens": 0,
    "received_ns": 0,
}


def test_a_request_and_a_step_are_drawn_whole(tmp_path: Path) -> None:
    spans = frame(
        SPANS,
        [
            span("chat", 1_000, 3_001, kind="server", input_tokens=5),
            span("queue", 1_100, 1_500, reason="admission"),
            span("prefill", 1_600, 1_800, step_seq=7),
            span("prefill_step", 1_500, 2_000, trace_id=b"e" * 16, step_seq=7),
            span("schedule", 1_500, 1_600, trace_id=b"e" * 16),
        ],
    )
    path = tmp_path / "trace.json"
    assert write_trace(path, spans, frame(STEPS, [STEP])) == 13
    document = json.loads(path.read_text())
    drawn = [e for e in document["traceEvents"] if e["ph"] == "X"]
    trace_id = {"trace_id": TRACE.hex()}
    step = {"step_seq": 7, "width": 1, "prefill_tokens": 5, "decode_tokens": 0}
    shape = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"], e["args"]) for e in drawn]
    assert shape == [
        (REQUESTS_PID, 0, "chat", 0.0, 2.001, {"input_tokens": 5, **trace_id}),
        (REQUESTS_PID, 0, "queue", 0.1, 0.4, {"reason": "admission", **trace_id}),
        (REQUESTS_PID, 0, "prefill", 0.6, 0.2, trace_id),
        (ENGINE_PID, 0, "prefill_step", 0.5, 0.5, step),
        (ENGINE_PID, 0, "schedule", 0.5, 0.1, {}),
        (ENGINE_PID, 0, "forward", 0.6, 0.2, {}),
        (ENGINE_PID, 0, "sample", 0.8, 0.1, {}),
    ]
    counters = [(e["name"], e["args"]) for e in document["traceEvents"] if e["ph"] == "C"]
    assert counters == [("width", {"0/0": 1})]


def test_nothing_to_draw_is_no_event() -> None:
    assert trace_events(frame(SPANS, []), frame(STEPS, [])) == []


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 30), st.integers(0, 30)), min_size=1))
def test_slices_of_a_lane_nest_and_belong_to_one_request(
    drawn: list[tuple[int, int, int]],
) -> None:
    rows = [
        span("work", start, start + length, trace_id=bytes([trace]) * 16)
        for trace, start, length in drawn
    ]
    events = [e for e in trace_events(frame(SPANS, rows), frame(STEPS, [])) if e["ph"] == "X"]
    assert len(events) == len(drawn)
    lanes: dict[object, list[tuple[int, int, str]]] = defaultdict(list)
    for event in events:
        start = round(float(event["ts"]) * 1000)  # type: ignore[arg-type]
        end = start + round(float(event["dur"]) * 1000)  # type: ignore[arg-type]
        lanes[event["tid"]].append((start, end, event["args"]["trace_id"]))  # type: ignore[index]
    for slices in lanes.values():
        for at, (start, end, trace) in enumerate(slices):
            for later_start, later_end, later_trace in slices[at + 1 :]:
                if later_start < end:
                    assert start <= later_start and later_end <= end and later_trace == trace
