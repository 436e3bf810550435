"""From a store to where the time went: analyzers and `perfledger attribute`, whole outputs."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random

import numpy as np
import polars as pl
import pytest

from perfledger import analyzers
from perfledger.analyzers.attribution import attribute, bands
from perfledger.analyzers.latency import Distribution
from perfledger.cli import main
from perfledger.schema.derive import request_rows, step_rows
from perfledger.schema.errors import NoDataError
from perfledger.schema.stages import STAGE_NAMES
from perfledger.schema.store import Store
from perfledger.schema.tables import REQUESTS, SPANS, STEPS

MS = 1_000_000
BASE = 1_790_000_000_000 * MS
ENGINE = b"e" * 16
Row = dict[str, object]


def trace(number: int) -> bytes:
    return number.to_bytes(16, "big")


def span(
    trace_id: bytes, number: int, parent: int, name: str, start: float, end: float, **more: object
) -> Row:
    """A span, times in ms after BASE; parent 0 is none."""
    return {
        "trace_id": trace_id,
        "span_id": number.to_bytes(8, "big"),
        "parent_span_id": parent.to_bytes(8, "big") if parent else None,
        "name": name,
        "kind": "internal",
        "start_ns": BASE + int(start * MS),
        "end_ns": BASE + int(end * MS),
        "run_id": "run-1",
        "service_name": "llm",
        "boot_id": "boot",
        "received_ns": BASE,
        **more,
    }


def request(number: int, at: float, queue: float, **more: object) -> list[Row]:
    """A request that waits, is prefilled for 10 ms and decoded for 5, with all spans; no steps."""
    own = trace(number)
    admitted, first = at + 1 + queue, at + 1 + queue + 10
    told: Row = {"kind": "server", "operation": "chat", "output_tokens": 2, "ttfc_ns": 20 * MS}
    return [
        span(own, 1, 0, "chat", at, first + 6) | told | more,
        span(own, 2, 1, "tokenize", at, at + 1),
        span(own, 3, 1, "queue", at + 1, admitted),
        span(own, 4, 1, "context", admitted, admitted),
        span(own, 5, 1, "detokenize", first + 5, first + 5.5),
        span(own, 6, 1, "stream", first + 5.5, first + 6),
        span(own, 7, 1, "sample", first - 1, first),
    ]


def step(seq: int, start: float, end: float, phase: str, *requests: int) -> list[Row]:
    """An engine step that samples in its last ms."""
    links = [
        {"trace_id": trace(n), "span_id": (1).to_bytes(8, "big"), "phase": phase, "tokens": 8}
        for n in requests
    ]
    tokens = [{"key": "perfledger.step.prefill_tokens", "int": 8 if phase == "prefill" else 0}]
    more: Row = {"links": links, "attributes": tokens, "replica": "0", "rank": 0, "step_seq": seq}
    return [
        span(ENGINE, 10 * seq, 0, f"{phase}_step", start, end, **more),
        span(ENGINE, 10 * seq + 1, 10 * seq, "schedule", start, start),
        span(ENGINE, 10 * seq + 2, 10 * seq, "sample", end - 1, end),
    ]


def served(number: int, at: float, queue: float, **more: object) -> list[Row]:
    """A request with its two steps."""
    admitted = at + 1 + queue
    return [
        *request(number, at, queue, **more),
        *step(2 * number, admitted, admitted + 10, "prefill", number),
        *step(2 * number + 1, admitted + 10, admitted + 15, "decode", number),
    ]


def write(folder: Path, rows: Sequence[Row], *, steps: bool = True, requests: bool = True) -> Store:
    """Write spans, and what the collector would have derived from them."""
    store = Store(folder)
    store.write("spans", SPANS.from_rows(rows))
    spans = pl.DataFrame(SPANS.from_rows(rows))
    made = step_rows(spans, received_ns=BASE)
    if steps:
        store.write("steps", made.to_arrow().cast(STEPS.arrow()))
    if requests:
        derived = request_rows(spans, made, received_ns=BASE)
        store.write("requests", derived.to_arrow().cast(REQUESTS.arrow()))
    return store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """20 requests; request n waits n ms in the queue. A refused and an aborted one beside them."""
    rows = [row for n in range(1, 21) for row in served(n, 100 * n, n)]
    rows += request(30, 5000, 1000, outcome="aborted", output_tokens=0)[:3]
    rows.append(request(31, 6000, 0, outcome="refused", output_tokens=0)[0])
    write(tmp_path, rows)
    return tmp_path


def told(**wanted: float) -> dict[str, float]:
    return {name: wanted.get(name, 0) * MS for name in STAGE_NAMES}


# --- The analyzers ------------------------------------------------------------------------------


def test_attribution_of_a_small_store(store: Path) -> None:
    found = attribute(analyzers.open(str(store)))
    assert (found.selection, len(found.requests)) == ("all requests", 22)
    assert found.statuses == {"aborted": 1, "ok": 20, "refused": 1}
    # 9 ms of prefill and 4 of decode outside of sampling; ties go to the earlier stage.
    assert found.longest_of_requests == {"prefill": 9, "queue": 12, "unattributed": 1}
    assert found.longest_by_status == {
        "aborted": {"queue": 1},
        "ok": {"prefill": 9, "queue": 11},
        "refused": {"unattributed": 1},
    }
    common = {"sample": 2, "prefill": 9, "decode": 4, "tokenize": 1}
    common |= {"detokenize": 0.5, "stream": 0.5}
    assert {name: asdict(band) for name, band in found.bands.items()} == {
        "p50": {
            "name": "p50",
            "requests": 2,
            "too_few": True,
            "e2e_ns": 27.5 * MS,
            "stages_ns": told(queue=10.5, **common),
            "sub_stages_ns": dict.fromkeys(found.bands["p50"].sub_stages_ns or (), 0.0),
            "longest": "queue",
            "longest_of_requests": {"queue": 2},
            "contributions": None,
        },
        "p95": {
            "name": "p95",
            "requests": 1,
            "too_few": True,
            "e2e_ns": 37 * MS,
            "stages_ns": told(queue=20, **common),
            "sub_stages_ns": dict.fromkeys(found.bands["p95"].sub_stages_ns or (), 0.0),
            "longest": "queue",
            "longest_of_requests": {"queue": 1},
            "contributions": {name: float(name == "queue") for name in STAGE_NAMES},
        },
        "p99": {**asdict(found.bands["p95"]), "name": "p99"},
    }
    assert list(found.bands["p50"].sub_stages_ns or ()) == [
        *("prefill_recompute", "host_gap_schedule", "host_gap_other_step", "host_gap_rest")
    ]
    assert found.client is None
    assert asdict(found.completeness) == {
        "requests": 22,
        "without_steps": 0,
        "missing_spans": {},
        "untimed_tokens": 0,
        "telemetry_gaps": 0,
        "records_dropped": 0,
        "lost_on_the_way": 0,
        "times_repaired": 0,
        "id_conflicts": 0,
        "not_derived": 0,
        "unsettled": 0,
        "differing": 0,
        "kept_by_chance": 0,
        "stand_for": 0,
        "without_root": 0,
    }
    assert found.completeness.losses() == []


def test_latencies_of_a_small_store(store: Path) -> None:
    latency = attribute(analyzers.open(str(store))).latency
    ttft = [(11 + n) * MS for n in range(1, 21)]
    assert latency.ttft_ns == Distribution(
        20, float(np.mean(ttft)), *(float(np.quantile(ttft, q)) for q in (0.5, 0.95, 0.99))
    )
    assert latency.ttfc_ns == Distribution(20, *[20.0 * MS] * 4)
    assert latency.itl_ns == Distribution(20, *[5.0 * MS] * 4)
    assert latency.e2e_ns.p50 == 27.5 * MS
    assert latency.ttft_stages_ns == told(sample=1, prefill=9, queue=10.5, tokenize=1)
    assert latency.ttft_tail_stages_ns == told(sample=1, prefill=9, queue=20, tokenize=1)
    # 20 steps of 10 ms with 8 prompt tokens each; 40 tokens from 100 ms to 6,017 ms.
    assert latency.prompt_tokens_per_s == 8 / 0.010
    assert latency.output_tokens_per_s == pytest.approx(40 / (6.017 - 0.1))


def test_bands_know_how_many_they_are() -> None:
    stages = {f"{name}_ns": [0] * 400 for name in STAGE_NAMES}
    from perfledger.schema.stages import SUB_STAGE_COLUMNS

    e2e = list(range(400))
    Random(1).shuffle(e2e)
    rows = pl.DataFrame(
        {
            **stages,
            **{name: [0] * 400 for name in SUB_STAGE_COLUMNS},
            "decode_ns": e2e,
            "e2e_ns": e2e,
            "trace_id": [trace(n) for n in range(400)],
            "span_id": [trace(n)[8:] for n in range(400)],
            "status": ["ok"] * 400,
            "longest": ["decode"] * 400,
        }
    )
    found = bands(rows)
    assert {name: (b.requests, b.too_few, b.e2e_ns) for name, b in found.items()} == {
        "p50": (40, False, np.mean(range(180, 220))),
        "p95": (20, False, np.mean(range(380, 400))),
        "p99": (4, True, np.mean(range(396, 400))),
    }
    contributions = found["p95"].contributions
    assert contributions is not None
    assert sum(contributions.values()) == pytest.approx(1)
    nothing = bands(rows.with_columns(status=pl.lit("error")))
    assert [(b.requests, b.e2e_ns, b.longest) for b in nothing.values()] == [(0, None, None)] * 3


# --- The client's view --------------------------------------------------------------------------


def client(number: int, start: float, chunks: Sequence[float], end: float, **more: object) -> Row:
    events = [{"time_ns": BASE + int(at * MS), "name": "chunk"} for at in chunks]
    events.append({"time_ns": BASE + int(start * MS), "name": "retry"})
    given: Row = {"kind": "client", "operation": "chat", "service_name": "load", "events": events}
    return span(trace(number), 99, 0, "chat", start, end) | given | more


def test_the_client_view_beside_the_server_view(tmp_path: Path) -> None:
    caller: Row = {"parent_span_id": (99).to_bytes(8, "big")}
    rows = [
        *served(1, 100, 4, **caller),  # arrives 100, first sample 115, ends 121
        client(1, 97, [117, 123], 124),
        *served(2, 200, 4, **caller),
        client(2, 199, [219], 225, boot_id="another"),
        client(3, 150, [], 160),
    ]
    write(tmp_path, rows)
    found = attribute(analyzers.open(str(tmp_path)).where(service="llm")).client
    assert found is not None
    values = {
        name: value["p50"] / MS if isinstance(value, dict) else value
        for name, value in asdict(found).items()
    }
    assert values == {
        "matched": 2,
        "unmatched": 1,
        "one_clock": 1,
        "ttft_ns": 20,
        "server_ttft_ns": 15,
        "ttft_difference_ns": 5,
        "e2e_ns": 26.5,
        "server_e2e_ns": 21,
        "e2e_difference_ns": 5.5,
        "before_ns": 3,
        "first_chunk_ns": 2,
        "after_ns": 3,
    }


# --- Selections and loss ------------------------------------------------------------------------


def test_selections(tmp_path: Path) -> None:
    rows = [
        *served(1, 100, 1),
        *(row | {"run_id": "run-2"} for row in served(2, 200, 1)),
        *(row | {"service_name": "other"} for row in served(3, 300, 1)),
    ]
    write(tmp_path, rows)
    everything = analyzers.open(str(tmp_path))

    def traces_of(**chosen: object) -> list[int]:
        found = attribute(everything.where(**chosen))  # type: ignore[arg-type]
        return [int.from_bytes(trace_id) for trace_id in found.requests["trace_id"]]

    assert traces_of() == [1, 2, 3]
    assert traces_of(run="run-2") == [2]
    assert traces_of(service="other") == [3]
    assert traces_of(from_ns=BASE + 200 * MS) == [2, 3]
    assert traces_of(from_ns=BASE + 200 * MS, to_ns=BASE + 300 * MS) == [2]
    with pytest.raises(NoDataError, match="no request matches"):
        traces_of(run="run-3")


def test_one_replica_of_several(tmp_path: Path) -> None:
    rows = [
        *served(1, 100, 1, replica="0"),
        *served(2, 200, 2, replica="1"),
        *request(3, 300, 3, outcome="refused")[:1],
    ]
    write(tmp_path, rows)
    of_one = analyzers.open(str(tmp_path)).where(service="llm", replica="1")
    found = attribute(of_one)
    assert (found.selection, len(found.requests)) == ("service llm, replica 1", 1)
    assert found.requests["trace_id"].to_list() == [trace(2)]
    assert found.requests["replica"].to_list() == ["1"]  # what its root says, not what its steps do
    assert (found.completeness.without_root, found.completeness.losses()) == (0, [])
    with pytest.raises(NoDataError, match="no request matches") as raised:
        attribute(of_one.where(replica="2"))
    assert "replica 2" in str(raised.value)


def test_a_run_of_clients_stands_for_the_requests_that_they_made(tmp_path: Path) -> None:
    caller: Row = {"parent_span_id": (99).to_bytes(8, "big")}
    rows = [
        *served(1, 100, 4, **caller),
        *served(2, 200, 4, **caller),
        *served(3, 250, 4),  # somebody else's
        *(client(number, 99 * number, [], 150 * number, run_id="load-1") for number in (1, 2)),
        client(8, 99, [], 150, run_id="load-2"),
    ]
    write(tmp_path, rows)
    everything = analyzers.open(str(tmp_path))
    found = attribute(everything.where(run="load-1"))
    assert [int.from_bytes(one) for one in found.requests["trace_id"]] == [1, 2]
    assert found.selection == (
        "requests made by run load-1, service llm, from 2026-09-21T14:13:20.100+00:00,"
        " to 2026-09-21T14:13:20.221+00:00"
    )
    assert found.client is not None and found.client.matched == 2
    assert found.completeness.losses() == []
    later = attribute(everything.where(run="load-1", from_ns=BASE + 150 * MS))
    assert [int.from_bytes(one) for one in later.requests["trace_id"]] == [2]
    lonely = "run load-2 is one of a client: 1 calls, and no request of a server continues"
    with pytest.raises(NoDataError, match=lonely):
        attribute(everything.where(run="load-2"))


def test_a_request_outside_the_selection_keeps_its_spans(tmp_path: Path) -> None:
    """Request 1 calls another service in the same trace; that one's wait is not its own."""
    inner: Row = {"trace_id": trace(1), "service_name": "other"}
    rows = [
        *request(1, 0, 4),
        span(trace(1), 50, 1, "chat", 2, 9, kind="client"),
        span(trace(1), 51, 50, "chat", 3, 8) | inner | {"kind": "server", "operation": "chat"},
        span(trace(1), 52, 51, "queue", 3, 8) | inner,
    ]
    write(tmp_path, rows)
    (row,) = attribute(analyzers.open(str(tmp_path)).where(service="llm")).requests.to_dicts()
    assert (row["queue_ns"], row["preemptions"]) == (4 * MS, 0)


def test_steps_that_the_collector_has_not_derived_are_found(tmp_path: Path) -> None:
    rows = [*served(1, 100, 1), *served(2, 200, 1)]
    write(tmp_path / "whole", rows)
    write(tmp_path / "none", rows, steps=False, requests=False)
    half = Store(tmp_path / "half")
    half.write("spans", SPANS.from_rows(rows))
    first = step_rows(pl.DataFrame(SPANS.from_rows(rows[:13])), received_ns=BASE)
    half.write("steps", first.to_arrow().cast(STEPS.arrow()))
    whole, none, half_found = (
        attribute(analyzers.open(str(tmp_path / name))) for name in ("whole", "none", "half")
    )
    assert none.requests.equals(whole.requests)
    assert half_found.requests.equals(whole.requests)
    assert none.completeness.not_derived == 2
    assert none.completeness.losses() == []


def test_spans_sent_twice_change_nothing(store: Path) -> None:
    once = attribute(analyzers.open(str(store)))
    for table in ("spans", "steps", "requests"):
        for path in Store(store).files(table):
            path.with_name(f"1{path.name}").write_bytes(path.read_bytes())
    twice = attribute(analyzers.open(str(store)))
    assert twice.requests.equals(once.requests)
    assert twice.latency == once.latency
    assert twice.completeness == once.completeness


def test_the_choices_of_a_request_share_its_token_times(tmp_path: Path) -> None:
    """Two steps gave three choices two tokens each; of the other request one token has no time."""
    choices: Row = {"attributes": [{"key": "gen_ai.request.choice.count", "int": 3}]}
    rows = [
        *served(1, 100, 1, output_tokens=6, **choices),
        *served(2, 200, 2, output_tokens=7, **choices),
    ]
    write(tmp_path, rows)
    found = attribute(analyzers.open(str(tmp_path)).where(service="llm"))
    assert found.completeness.untimed_tokens == 1


def test_loss_is_counted(tmp_path: Path) -> None:
    rows = [*served(1, 100, 1), *served(2, 200, 2), *request(3, 300, 3)[:1]]
    store = write(tmp_path, rows)
    dropped = [{"key": "perfledger.dropped", "int": 7}]
    late = [
        span(trace(2), 3, 1, "queue", 0, 250),  # other content under a known id
        span(trace(2), 20, 1, "encode", 201, 202),
        span(ENGINE, 900, 0, "telemetry_dropped", 150, 250, attributes=dropped),
        # Long before, and of another service: not ours.
        span(ENGINE, 901, 0, "telemetry_dropped", 1, 2, attributes=dropped),
        span(ENGINE, 902, 0, "telemetry_dropped", 150, 250, service_name="x"),
        span(b"z" * 16, 1, 0, "work", 0, 1),
        span(b"z" * 16, 1, 0, "work", 0, 2),
    ]
    store.write("spans", SPANS.from_rows(late))
    found = attribute(analyzers.open(str(tmp_path)).where(service="llm")).completeness
    assert asdict(found) == {
        "requests": 3,
        "without_steps": 1,
        "missing_spans": dict.fromkeys(
            ("tokenize", "queue", "context", "sample", "detokenize", "stream"), 1
        ),
        "untimed_tokens": 2,
        "telemetry_gaps": 1,
        "records_dropped": 7,
        "lost_on_the_way": 0,
        "times_repaired": 0,
        "id_conflicts": 1,
        "not_derived": 0,
        "unsettled": 0,
        "differing": 1,
        "kept_by_chance": 0,
        "stand_for": 0,
        "without_root": 0,
    }
    assert found.losses() == [
        "7 telemetry records dropped in 1 gaps",
        "1 span ids are carried by several different spans",
        "1 stored requests differ from their spans (late spans?)",
    ]


# --- The command --------------------------------------------------------------------------------


def test_a_line_a_request(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", "--store", str(store), "--per-request", "--jsonl"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 22
    stages = {name: int(ns) for name, ns in told(queue=2, sample=2, prefill=9, decode=4).items()}
    stages |= {"tokenize": MS, "detokenize": MS // 2, "stream": MS // 2}
    wanted = {
        "trace_id": trace(2).hex(),
        "span_id": "0000000000000001",
        "e2e_ns": 19 * MS,
        "ttft_ns": 13 * MS,
        "ttfc_ns": 20 * MS,
        "status": "ok",
        "stages": stages,
        "longest": "prefill",
    }
    assert lines[1] == json.dumps(wanted, separators=(",", ":"))
    refused = json.loads(lines[-1])
    assert (refused["status"], refused["ttft_ns"]) == ("refused", None)
    for line in map(json.loads, lines):
        assert sum(line["stages"].values()) == line["e2e_ns"]


def test_the_json_object(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", "--store", str(store), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == [
        *("selection", "requests", "statuses", "longest_of_requests", "longest_by_status"),
        *("bands", "latency", "client", "completeness", "losses", "definitions"),
    ]
    assert printed["bands"]["p95"]["longest"] == "queue"
    definitions = printed["definitions"]
    assert printed["latency"].keys() <= definitions["latency"].keys()
    assert printed["completeness"].keys() - {"requests"} <= definitions["completeness"].keys()


def test_the_screen(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", "--store", str(store)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("p95: the longest stage is queue, 54.1 % of 37.0 ms (1 request")
    assert max(map(len, printed)) <= 80
    assert len(printed) <= 50
    rows = {line[:12].strip(): line[12:].split() for line in printed}
    assert rows["queue"] == ["10.5", "20.0", "20.0", "54.1", "%", "100.0", "%", "10.5", "12"]
    assert rows["encode"] == ["0.0", "0.0", "0.0", "0.0", "%", "0.0", "%", "0.0", "0"]
    assert set(STAGE_NAMES) <= rows.keys()


def test_the_slowest_requests(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attribute", "--store", str(store), "--per-request"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "the slowest 20 of 22 requests (all: --jsonl)"
    assert printed[3].split() == [trace(30).hex(), "1,017.0", "–", "queue", "98.3", "%"]
    assert max(map(len, printed)) <= 80


def test_exit_codes(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def code(*arguments: str) -> tuple[int, str]:
        return main(["attribute", "--store", *arguments]), capsys.readouterr().err

    number, error = code(str(tmp_path / "nothing"))
    assert number == 4
    assert "no spans in this store" in error and "perfledger collect" in error
    number, error = code(str(store), "--run", "no-such-run")
    assert number == 4
    assert "run no-such-run" in error
    assert code(str(store), "--from", "yesterday")[0] == 2
    lost = [span(ENGINE, 900, 0, "telemetry_dropped", 100, 200)]
    Store(store).write("spans", SPANS.from_rows(lost))
    assert main(["attribute", "--store", str(store), "--json"]) == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out)["losses"] == ["0 telemetry records dropped in 1 gaps"]
    assert "dropped" in captured.err


def test_a_process_of_its_own(store: Path) -> None:
    command = [sys.executable, "-P", "-m", "perfledger", "attribute", "--store", str(store)]
    done = subprocess.run([*command, "--band", "p50"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("p50: the longest stage is queue, 38.2 % of 27.5 ms (2 requests")


def test_requests_that_all_failed_have_no_bands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [request(n, 10 * n, 0, outcome="refused", output_tokens=0)[0] for n in range(1, 4)]
    rows.append(span(trace(9), 1, 0, "chat", 5, 5) | {"kind": "server", "outcome": "error"})
    write(tmp_path, rows)
    assert main(["attribute", "--store", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == [
        "No request ended ok, so there is no band to explain.",
        "all requests, 4 requests: error 1 (longest sample 1); refused 3 (longest",
    ]
    assert main(["attribute", "--store", str(tmp_path), "--per-request"]) == 0
    assert main(["attribute", "--store", str(tmp_path), "--json"]) == 0
