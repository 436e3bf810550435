"""From bytes to chunks, from samples to numbers and rows: the parts of the client without I/O."""

import json
from array import array
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.load.plan import LoadPlan, LoadResult, Sample
from perfledger.instrumented_runtime.load.results import write_result
from perfledger.instrumented_runtime.load.sse import Chunk, EventBuffer, Usage, read_chunk
from perfledger.instrumented_runtime.load.summary import Metric, summarise
from perfledger.instrumented_runtime.load.workload import Arrival, Scaling, Workload
from perfledger.schema.clocks import ClockAnchor
from perfledger.schema.store import Store

MS = 1_000_000
S = 1_000_000_000


@given(st.data())
def test_events_are_the_same_however_the_network_cuts_them(data: st.DataObject) -> None:
    events = [b'{"a":1}', b"[DONE]", '{"text":"\u00e9\u6f22"}'.encode()]
    raw = b": ping\r\n" + b"".join(
        b"data:" + space + event + end
        for event, space, end in zip(
            events, (b" ", b"", b" "), (b"\n\n", b"\r\n\r\n", b"\n"), strict=True
        )
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    buffer = EventBuffer()
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert [event for piece in pieces for event in buffer.feed(piece)] == events


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["choices", "delta", "text", "content", "usage", "id", "x"]), inner
            )
        ),
    ).filter(lambda value: isinstance(value, dict))
)
def test_any_json_object_is_read_as_a_chunk(fields: dict[str, object]) -> None:
    chunk = read_chunk(json.dumps(fields).encode())
    assert isinstance(chunk, Chunk)
    assert chunk.channel in ("", "o", "r", "t")


def test_counts_that_are_none_are_unknown() -> None:
    counts = {"prompt_tokens": True, "completion_tokens": -1, "prompt_tokens_details": None}
    assert read_chunk(json.dumps({"usage": counts}).encode()).usage == Usage()


# --- Numbers and rows ---------------------------------------------------------------------


def sample(
    index: int, scheduled_ms: int, sent_ms: int, chunks_ms: list[int], **fields: Any
) -> Sample:
    return Sample(
        index=index,
        warm_up=fields.pop("warm_up", False),
        arrival=Arrival(scheduled_ms * MS, 8, 6, (), "chat"),
        trace_id=bytes([index + 1]) * 16,
        span_id=bytes([index + 1]) * 8,
        scheduled_ns=scheduled_ms * MS,
        sent_ns=sent_ms * MS,
        end_ns=fields.pop("end_ms", 400) * MS,
        chunk_ns=array("q", [ms * MS for ms in chunks_ms]),
        channels=fields.pop("channels", "o" * len(chunks_ms)),
        choices=fields.pop("choices", [0] * len(chunks_ms)),
        **fields,
    )


def finished(*samples: Sample, **fields: Any) -> LoadResult:
    work = Workload("test", "here", tuple(s.arrival for s in samples if not s.warm_up))
    return LoadResult(
        plan=LoadPlan("http://user:hush@host:1/v1?key=hush", work, run_id="r1", seed=3),
        model="m",
        anchor=ClockAnchor(0, 1_000 * S, "boot"),
        started_ns=0,
        samples=samples,
        loop_lag_ns=array("q", [MS, 3 * MS]),
        ended="finished",
        unsent=0,
        **fields,
    )


RESULT = finished(
    sample(0, 0, 0, [5], warm_up=True, input_tokens=8, output_tokens=1),
    sample(0, 0, 2, [52, 62, 92], input_tokens=9, output_tokens=6, http_status=200),
    sample(1, 100, 104, [124, 302], channels="ro", input_tokens=8, output_tokens=4),
    sample(2, 200, 203, [], error="http_500", detail="canary", http_status=500),
)


def test_a_summary_is_computed_from_raw_samples() -> None:
    summary = asdict(summarise(RESULT))
    metrics = {
        name: (m["mean"], m["p50"], m["p95"], m["n"]) for name, m in summary["metrics"].items()
    }
    assert metrics == {
        "ttft_ns": (35 * MS, 35 * MS, pytest.approx(48.5 * MS), 2),
        "ttft_from_schedule_ns": (38 * MS, 38 * MS, pytest.approx(50.6 * MS), 2),
        "ttfo_ns": (124 * MS, 124 * MS, pytest.approx(190.6 * MS), 2),
        "itl_ns": (pytest.approx(218 / 3 * MS), 30 * MS, pytest.approx(163.2 * MS), 3),
        "e2e_ns": (144 * MS, 144 * MS, pytest.approx(192.6 * MS), 2),
        "e2e_from_schedule_ns": (147 * MS, 147 * MS, pytest.approx(196.5 * MS), 2),
        "lateness_ns": (3 * MS, 3 * MS, pytest.approx(3.9 * MS), 3),
        "loop_lag_ns": (2 * MS, 2 * MS, pytest.approx(2.9 * MS), 2),
    }
    counted = ("sent", "ok", "failed", "aborted", "unsent", "warm_up", "usage_missing")
    assert [summary[name] for name in counted] == [3, 2, {"http_500": 1}, 0, 0, 1, 0]
    assert summary["rate_asked"] == 10
    assert summary["rate_achieved"] == pytest.approx(2 / 0.201)
    assert summary["window_s"] == pytest.approx(0.3)
    assert summary["output_tokens_per_s"] == pytest.approx(10 / 0.3)
    assert summary["realised_input_tokens"]["mean"] == 8.5
    assert summary["client_is_bottleneck"] is False
    assert set(summary["metrics"]) <= set(summary["definition"])


def test_gaps_are_between_chunks_of_one_choice() -> None:
    of_two = sample(0, 0, 0, [10, 12, 15, 30, 31], choices=[0, 1, 0, 0, 1], output_tokens=5)
    itl = summarise(finished(of_two)).metrics["itl_ns"]
    assert (itl.n, itl.mean, itl.p50) == (3, 13 * MS, 15 * MS)  # 5, 15 and 19 ms


def test_a_late_client_says_so() -> None:
    late = finished(sample(0, 0, 200, [210], output_tokens=1))
    assert summarise(late).client_is_bottleneck is True


def test_without_a_success_nothing_is_a_number() -> None:
    summary = summarise(finished(sample(0, 0, 0, [], error="timeout")))
    nothing = Metric(None, None, None, None, None, 0)
    assert {summary.metrics[name] for name in ("ttft_ns", "itl_ns", "e2e_ns")} == {nothing}
    assert (summary.output_tokens_per_s, summary.rate_achieved, summary.window_s) == (None,) * 3


def test_spans_and_run_are_written_without_content(tmp_path: Path) -> None:
    store = Store.at(str(tmp_path))
    write_result(store, RESULT)
    rows = store.scan("spans").sort("start_ns").collect().to_dicts()
    full = {k: v for k, v in rows[2].items() if v is not None and k != "received_ns"}
    attributes = {
        pair["key"]: next(v for k, v in pair.items() if k != "key" and v is not None)
        for pair in full.pop("attributes")
    }
    events = [
        (e["time_ns"], e["name"], [a["text"] for a in e["attributes"] or []])
        for e in full.pop("events")
    ]
    assert full == {
        "trace_id": b"\2" * 16,
        "span_id": b"\2" * 8,
        "name": "text_completion",
        "kind": "client",
        "start_ns": 1000 * S + 104 * MS,
        "end_ns": 1000 * S + 400 * MS,
        "status": "ok",
        "run_id": "r1",
        "service_name": "perfledger-load",
        "boot_id": "boot",
        "scope_name": "perfledger.load",
        "scope_version": "1",
        "operation": "text_completion",
        "model": "m",
        "input_tokens": 8,
        "output_tokens": 4,
        "outcome": "ok",
        "traffic_class": "chat",
    }
    assert attributes == {
        "perfledger.client.index": 1,
        "perfledger.client.warmup": False,
        "perfledger.client.scheduled_ns": 1000 * S + 100 * MS,
        "perfledger.client.lateness_ns": 4 * MS,
        "perfledger.client.input_tokens": 8,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.stream": True,
    }
    assert events == [
        (1000 * S + 124 * MS, "chunk", ["reasoning"]),
        (1000 * S + 302 * MS, "chunk", []),
    ]
    assert [(row["outcome"], row["error_type"]) for row in rows] == [
        ("ok", None),
        ("ok", None),
        ("ok", None),
        ("error", "http_500"),
    ]
    (run,) = store.scan("runs").collect().to_dicts()
    samples, manifest = json.loads(run["samples"]), json.loads(run["manifest"])
    assert (run["run_id"], run["kind"], run["created_ns"]) == ("r1", "load", 1000 * S)
    assert samples["workload_sha256"] == manifest["workload.hash"] == RESULT.plan.workload.sha256()
    assert samples["scaling"] == asdict(Scaling())
    assert (samples["seed"], samples["failed"]) == (3, {"http_500": 1})
    everything = str(rows) + str(run)
    assert [word for word in ("canary", "hush") if word in everything] == []


def test_labels_and_choices_are_written(tmp_path: Path) -> None:
    store = Store.at(str(tmp_path))
    labelled = replace(
        sample(0, 0, 0, [10, 12, 14], channels="oor", choices=[0, 1, 1], http_status=429),
        arrival=Arrival(0, 8, 6, (), "chat", "acme", "s1", -3, 500),
        error="http_429_deadline",
    )
    result = finished(labelled)
    write_result(store, replace(result, plan=replace(result.plan, n=2)))
    (row,) = store.scan("spans").collect().to_dicts()
    names = ("tenant", "session", "deadline_ms", "outcome", "error_type")
    assert [row[name] for name in names] == ["acme", "s1", 500, "refused", "http_429_deadline"]
    found = {pair["key"]: pair["int"] for pair in row["attributes"]}
    assert (found["perfledger.priority"], found["gen_ai.request.choice.count"]) == (-3, 2)
    assert [
        [(a["key"], a["text"] or a["int"]) for a in event["attributes"] or []]
        for event in row["events"]
    ] == [
        [],
        [("perfledger.client.choice", 1)],
        [("perfledger.client.channel", "reasoning"), ("perfledger.client.choice", 1)],
    ]
    manifest = json.loads(store.scan("runs").collect()["manifest"][0])
    assert manifest["workload.sampling"] == "temperature 0, ignore_eos, n 2"
