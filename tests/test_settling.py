"""Steps and requests are derived while spans arrive, once, completely and in bounded memory."""

from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import perfledger.collectors.settling as settling_module
from perfledger.collectors.settling import Settled, SettleLimits, Settling
from perfledger.schema.derive import request_rows, step_rows
from perfledger.schema.store import Store
from perfledger.schema.tables import REQUESTS, SPANS, STEPS

S = 1_000_000_000
WALL_NS = 1_700_000_000 * S
TRACE, ROOT, ENGINE = b"t" * 16, b"root0001", b"e" * 16

Row = dict[str, object]


def row(name: str, span_id: bytes, start: int, end: int, **changes: object) -> Row:
    """A span; times are ns after WALL_NS."""
    fields: Row = {
        "trace_id": TRACE,
        "span_id": span_id,
        "parent_span_id": ROOT,
        "name": name,
        "kind": "internal",
        "start_ns": WALL_NS + start,
        "end_ns": WALL_NS + end,
        "received_ns": WALL_NS,
    }
    return {**fields, **changes}


def root(trace: bytes = TRACE, span_id: bytes = ROOT, start: int = 0, end: int = 1000) -> Row:
    changes = {"trace_id": trace, "kind": "server", "operation": "chat", "parent_span_id": None}
    return row("chat", span_id, start, end, **changes)


def step(seq: int, start: int, end: int, phase: str, *members: tuple[bytes, bytes]) -> list[Row]:
    """A step's span with its links, and its two children."""
    span_id = b"step%04d" % seq
    inside = {"trace_id": ENGINE, "parent_span_id": span_id}
    links = [(trace, member, phase, 1, []) for trace, member in members]
    kind = "prefill_step" if phase == "prefill" else "decode_step"
    engine = {"trace_id": ENGINE, "parent_span_id": None, "replica": "0", "rank": 0}
    return [
        row(kind, span_id, start, end, **engine, step_seq=seq, links=links),
        row("schedule", b"sche%04d" % seq, start, start + 10, **inside),
        row("sample", b"samp%04d" % seq, end - 20, end, **inside),
    ]


QUEUE = row("queue", b"queue001", 100, 200)
CONTEXT = row("context", b"context1", 200, 250)
PREFILL = step(1, 250, 400, "prefill", (TRACE, ROOT))
DECODE = step(2, 450, 600, "decode", (TRACE, ROOT))
STREAM = row("stream", b"stream01", 600, 900)
# As they arrive: what the engine does first, the root last.
PARTS = [QUEUE, CONTEXT, *PREFILL, *DECODE, STREAM]
STAGES = {
    "queue_ns": 100,
    "context_ns": 50,
    "prefill_ns": 120,
    "sample_ns": 40,
    "decode_ns": 120,
    "host_gap_ns": 70,
    "stream_ns": 300,
    "unattributed_ns": 200,
}


def arrow(rows: list[Row]) -> pa.Table:
    return SPANS.from_rows(rows)


def stages(request: Row) -> Row:
    """Return the stages that have time."""
    return {k: request[k] for k in STAGES} | {"e2e_ns": request["e2e_ns"]}


def derived_by(
    settling: Settling, *arrivals: tuple[float, list[Row]], until_s: int
) -> list[Settled]:
    """Feed arrivals, settling every second until `until_s`; return what was written."""
    written = []
    waiting = sorted(arrivals, key=lambda arrival: arrival[0])
    for second in range(until_s + 1):
        while waiting and waiting[0][0] <= second:
            at_s, rows = waiting.pop(0)
            settling.add(arrow(rows), int(at_s * S))
        written.append(settling.settle(second * S, WALL_NS + second * S))
    return written


def requests_of(written: list[Settled]) -> list[Row]:
    return [request for settled in written for request in settled.requests.to_pylist()]


def test_a_request_is_derived_when_its_root_has_settled() -> None:
    settling = Settling()
    written = derived_by(settling, (0.5, PARTS), (1, [root()]), until_s=90)
    (request,) = requests_of(written)
    assert stages(request) == {**STAGES, "e2e_ns": 1000}
    assert sum(request[f"{name}"] for name in STAGES) == 1000
    assert (request["version"], request["received_ns"]) == (1, WALL_NS + 6 * S)
    assert [s.steps.num_rows for s in written[:8]] == [0, 0, 0, 0, 0, 0, 2, 0]
    whole = pl.DataFrame(arrow([*PARTS, root()]))
    steps = step_rows(whole, WALL_NS + 6 * S)
    expected = request_rows(whole, steps, received_ns=WALL_NS + 6 * S)
    assert written[6].requests.to_pylist() == expected.to_dicts()
    assert written[6].steps.sort_by("step_seq").to_pylist() == steps.sort("step_seq").to_dicts()
    assert +settling.counts == {"steps_derived": 2, "requests_derived": 1}


def test_a_late_span_makes_a_second_version_and_a_late_step_too() -> None:
    settling = Settling()
    arrivals = [(1, [QUEUE, CONTEXT, *PREFILL, root()]), (9, [STREAM]), (30, DECODE)]
    requests = requests_of(derived_by(settling, *arrivals, until_s=90))
    assert [request["version"] for request in requests] == [1, 2, 3]
    assert [(r["received_ns"] - WALL_NS) // S for r in requests] == [6, 21, 61]
    assert [(r["stream_ns"], r["decode_ns"]) for r in requests] == [(0, 0), (300, 0), (300, 120)]
    assert stages(requests[-1]) == {**STAGES, "e2e_ns": 1000}
    assert settling.counts["requests_rewritten"] == 2


def test_what_is_sent_again_makes_no_new_row_however_late() -> None:
    everything = [*PARTS, root()]
    arrivals = [(second, everything) for second in (0, 0, 3, 10, 70, 150)]
    settling = Settling()
    written = derived_by(settling, *arrivals, until_s=250)
    (request,) = requests_of(written)
    assert stages(request) == {**STAGES, "e2e_ns": 1000}
    assert sum(settled.steps.num_rows for settled in written) == 2


def test_a_step_is_written_once_and_lasts_for_all_requests_that_it_served() -> None:
    other = b"u" * 16
    both = step(1, 250, 400, "prefill", (TRACE, ROOT), (other, ROOT))
    arrivals = [(0, [*both, root()]), (70, [root(trace=other)])]
    written = derived_by(Settling(), *arrivals, until_s=80)
    assert [(r["trace_id"], r["prefill_ns"], r["steps"]) for r in requests_of(written)] == [
        (TRACE, 120, 1),
        (other, 120, 1),
    ]
    assert sum(settled.steps.num_rows for settled in written) == 1


def test_requests_of_one_trace_settle_each_at_its_time() -> None:
    second_root = b"root0002"
    child = row("queue", b"queue002", 2100, 2150, parent_span_id=second_root)
    nested = row("tokenize", b"tokeniz2", 2200, 2210, parent_span_id=b"queue002")
    arrivals = [
        (0, [QUEUE, child, nested, root()]),
        (100, [root(span_id=second_root, start=2000, end=3000)]),
    ]
    requests = requests_of(derived_by(Settling(), *arrivals, until_s=110))
    assert [(r["span_id"], r["queue_ns"], r["tokenize_ns"]) for r in requests] == [
        (ROOT, 100, 0),
        (second_root, 50, 10),
    ]


def test_stopping_derives_all_that_is_pending_at_once() -> None:
    settling = Settling()
    settling.add(arrow([*PARTS, root()]), 0)
    settled = settling.settle(1, WALL_NS, everything=True)
    assert settled.steps.num_rows == 2
    (request,) = settled.requests.to_pylist()
    assert stages(request) == {**STAGES, "e2e_ns": 1000}
    again = settling.settle(2, WALL_NS, everything=True)
    assert (again.steps.num_rows, again.requests.num_rows) == (0, 0)


def test_nothing_is_held_of_requests_that_are_done() -> None:
    settling = Settling()
    derived_by(settling, (0, [*PARTS, root()]), until_s=61)
    assert settling.held_spans == 0


def test_over_the_limit_the_oldest_go_and_what_may_lack_them_is_not_derived() -> None:
    settling = Settling(SettleLimits(max_spans=6))
    strays = [
        row("GET", b"stray%03d" % n, n, n + 50, trace_id=b"g" * 16, parent_span_id=None)
        for n in range(10)
    ]
    settling.add(arrow([QUEUE, root()]), 0)
    settling.settle(0, WALL_NS)
    settling.add(arrow(strays), S)
    settling.settle(S, WALL_NS)
    assert (settling.held_spans, settling.counts["spans_let_go"]) == (6, 6)
    settling.add(arrow([root(end=2000)]), 2 * S)  # began before the strays that went had ended
    later = root(trace=b"v" * 16, start=1000, end=3000)
    settling.add(arrow([later]), 2 * S)
    settled = settling.settle(9 * S, WALL_NS)
    assert settled.requests["trace_id"].to_pylist() == [b"v" * 16]
    assert settling.counts["requests_skipped"] == 1


def test_spans_without_a_request_are_held_for_a_while_and_no_longer() -> None:
    settling = Settling(SettleLimits(hold_s=100))
    settling.add(arrow([QUEUE]), 0)
    settling.settle(100 * S, WALL_NS)
    assert settling.held_spans == 1
    settling.settle(101 * S, WALL_NS)
    assert settling.held_spans == 0


def test_a_step_that_ends_in_a_nonsense_future_hides_no_request() -> None:
    settling = Settling(SettleLimits(hold_s=100))
    settling.add(arrow([row("GET", b"stray001", 0, 2**60, trace_id=b"g" * 16)]), 0)
    settling.settle(101 * S, WALL_NS)
    settling.add(arrow([root(start=1, end=10)]), 102 * S)
    assert settling.settle(110 * S, WALL_NS).requests.num_rows == 1


def test_steps_are_held_within_their_limit() -> None:
    settling = Settling(SettleLimits(max_step_bytes=20_000))
    for seq in range(200):
        settling.add(arrow(step(seq, seq * 100, seq * 100 + 90, "decode", (TRACE, ROOT))), 0)
    written = settling.settle(10 * S, WALL_NS)
    assert written.steps.num_rows == 200
    assert 0 < 200 - settling.counts["steps_let_go"] < 200


@pytest.mark.parametrize("checked", [True, False], ids=["after a kill", "after a clean stop"])
def test_a_restart_goes_on_where_the_last_collector_ended(tmp_path: Path, checked: bool) -> None:
    store = Store.at(str(tmp_path))
    first = Settling()
    first.add(arrow([QUEUE, CONTEXT, *PREFILL, root()]), 0)
    store.write("spans", arrow([QUEUE, CONTEXT, *PREFILL, root()]))
    if not checked:
        settled = first.settle(0, WALL_NS, everything=True)
        store.write("steps", settled.steps)
        store.write("requests", settled.requests)
    tables = [store.scan(name).collect() for name in ("spans", "steps", "requests", "collectives")]
    second = Settling()
    second.resume(*tables, since_ns=0, now_ns=0)
    settled = second.settle(6 * S, WALL_NS + 1)
    expected = 1 if checked else 0
    assert (settled.steps.num_rows, settled.requests.num_rows) == (expected, expected)
    second.add(arrow([*DECODE, STREAM, root()]), 7 * S)
    (request,) = second.settle(30 * S, WALL_NS + 2).requests.to_pylist()
    assert (request["version"], stages(request)) == (2, {**STAGES, "e2e_ns": 1000})


def test_a_restart_leaves_requests_alone_whose_time_is_over(tmp_path: Path) -> None:
    store = Store.at(str(tmp_path))
    checked = {**root(), "received_ns": WALL_NS - 100 * S}
    begun_before = root(trace=b"v" * 16, start=-20)
    store.write("spans", arrow([checked, begun_before, root(trace=b"w" * 16, start=-5)]))
    settling = Settling()
    empty = [store.scan(name).collect() for name in ("steps", "requests", "collectives")]
    spans = store.scan("spans").collect()
    settling.resume(spans, *empty, since_ns=WALL_NS - 10, now_ns=0)
    requests = settling.settle(100 * S, WALL_NS).requests
    assert requests["trace_id"].to_pylist() == [b"w" * 16]


@settings(max_examples=30, deadline=None)
@given(st.permutations([*PARTS, root()]), st.lists(st.integers(0, 9), max_size=4))
def test_any_order_and_split_of_arrivals_gives_the_same_request(
    spans: list[Row], cuts: list[int]
) -> None:
    settling = Settling()
    edges = [0, *sorted(cuts), len(spans)]
    for at, (start, end) in enumerate(zip(edges, edges[1:], strict=False)):
        settling.add(arrow(spans[start:end]), at)
        settling.settle(at, WALL_NS)
    settled = settling.settle(100, WALL_NS, everything=True)
    (request,) = settled.requests.to_pylist()
    assert stages(request) == {**STAGES, "e2e_ns": 1000}
    assert settled.requests.schema.equals(REQUESTS.arrow())
    assert settled.steps.schema.equals(STEPS.arrow())
    assert settled.steps.num_rows == 2


# --- What cannot be derived ---------------------------------------------------------------------


class Hostile(Exception):
    """Stands for a defect that nobody knows of yet."""


def fail_on(monkeypatch: pytest.MonkeyPatch, name: str, poison: bytes) -> list[int]:
    """Let a derivation raise where the span `poison` is among its spans; return its batch sizes."""
    derive = getattr(settling_module, name)
    sizes: list[int] = []

    def failing(spans: pl.DataFrame, *rest: object, **more: object) -> pl.DataFrame:
        sizes.append(len(spans))
        if poison in spans["span_id"].to_list():
            raise Hostile
        return derive(spans, *rest, **more)

    monkeypatch.setattr(settling_module, name, failing)
    return sizes


def test_a_step_with_hostile_counts_is_derived_like_any_other() -> None:
    poison = step(3, 700, 800, "decode", (TRACE, ROOT))
    poison[0]["attributes"] = [{"key": "perfledger.step.width", "int": 2**40}]
    settling = Settling()
    written = derived_by(settling, (0, [*PARTS, *poison, root()]), until_s=61)
    assert [settled.steps.num_rows for settled in written if settled.steps] == [3]
    assert len(requests_of(written)) == 1
    assert (settling.held_spans, [s.defects for s in written if s.defects]) == (0, [])


def test_a_step_that_cannot_be_derived_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on(monkeypatch, "step_rows", b"step0003")
    settling = Settling()
    poison = step(3, 700, 800, "decode", (TRACE, ROOT))
    again = root(trace=b"v" * 16, start=1000, end=3000)
    arrivals = [(0, [*poison, *PARTS, root()]), (70, [again])]
    written = derived_by(settling, *arrivals, until_s=700)
    assert sum(settled.steps.num_rows for settled in written) == 2
    assert [(r["trace_id"], r["e2e_ns"]) for r in requests_of(written)] == [
        (TRACE, 1000),
        (b"v" * 16, 2000),
    ]
    assert stages(requests_of(written)[0]) == {**STAGES, "e2e_ns": 1000}
    assert (settling.counts["steps_failed"], settling.held_spans) == (1, 0)
    assert [type(d) for settled in written for d in settled.defects] == [Hostile]


def test_a_request_that_cannot_be_derived_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_on(monkeypatch, "request_rows", b"poison01")
    others = [root(trace=b"%016d" % n) for n in range(9)]
    poison = row("queue", b"poison01", 1, 2, trace_id=others[4]["trace_id"])
    settling = Settling()
    written = derived_by(settling, (0, [*others, poison]), until_s=61)
    assert {r["trace_id"] for r in requests_of(written)} == {
        other["trace_id"] for other in others if other is not others[4]
    }
    checks = len(SettleLimits().checks_ns)  # it was tried once at each
    assert (settling.counts["requests_failed"], settling.held_spans) == (checks, 0)


def test_what_failed_once_is_derived_at_its_next_check(monkeypatch: pytest.MonkeyPatch) -> None:
    settling = Settling()
    with monkeypatch.context() as patch:
        fail_on(patch, "request_rows", ROOT)
        assert requests_of(derived_by(settling, (0, [*PARTS, root()]), until_s=10)) == []
    (request,) = settling.settle(30 * S, WALL_NS).requests.to_pylist()
    assert stages(request) == {**STAGES, "e2e_ns": 1000}


def test_if_nothing_at_all_can_be_derived_memory_and_work_stay_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = fail_on(monkeypatch, "request_rows", ROOT)
    settling = Settling()
    settling.add(arrow([root(trace=b"%016d" % n) for n in range(1000)]), 0)
    settled = settling.settle(61 * S, WALL_NS)
    assert settled.requests.num_rows == 0
    assert (settling.counts["requests_failed"], settling.held_spans) == (1000, 0)
    assert len(sizes) < 100 and len(settled.defects) < 50


def test_memory_is_let_go_and_checks_stay_due_though_settling_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settling = Settling(SettleLimits(max_spans=50))
    with monkeypatch.context() as patch:
        patch.setattr(settling, "_changed", lambda rows: 1 / 0)
        for n in range(20):
            settling.add(arrow([root(trace=b"%08d%08d" % (n, m)) for m in range(10)]), 0)
            with pytest.raises(ZeroDivisionError):
                settling.settle(10 * S, WALL_NS)
            assert settling.held_spans <= 50
    fresh = root(trace=b"v" * 16, start=1001, end=3000)
    settling.add(arrow([fresh]), 10 * S)
    made = settling.settle(20 * S, WALL_NS).requests["trace_id"].to_pylist()
    assert b"v" * 16 in made
