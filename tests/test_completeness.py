"""What is missing is said: telemetry lost on the way, repaired times, rows not settled."""

import json
import time
from pathlib import Path

import pytest

from perfledger import analyzers
from perfledger.analyzers.attribution import attribute
from perfledger.cli import main
from perfledger.schema.derive import request_rows, step_rows
from perfledger.schema.store import Store
from perfledger.schema.tables import POINTS, REQUESTS, SPANS

SECOND = 1_000_000_000
OLD_NS = time.time_ns() - 3600 * SECOND


def root(number: int, at_ns: int, **more: object) -> dict[str, object]:
    row: dict[str, object] = {"trace_id": bytes([number]) * 16, "span_id": bytes([number]) * 8}
    row |= {"name": "chat", "kind": "server", "operation": "chat", "outcome": "ok"}
    row |= {"start_ns": at_ns, "end_ns": at_ns + SECOND, "service_instance_id": "a", "run_id": "r"}
    return row | {"received_ns": at_ns} | more


def lost(at_ns: int, value: int, where: str = "export", instance: str = "a") -> dict[str, object]:
    attribute = {"key": "perfledger.telemetry.where", "text": where}
    row: dict[str, object] = {"time_ns": at_ns, "name": "perfledger.telemetry.lost", "run_id": "r"}
    row |= {"kind": "sum", "value": float(value), "attributes": [attribute]}
    return row | {"service_instance_id": instance, "received_ns": at_ns}


def found(store: Store) -> dict[str, object]:
    selection = analyzers.open(str(store.root)).where(run="r")
    return vars(attribute(selection).completeness)


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([], 0),
        # Nothing lost in the window: the counter stood at 7 before and after.
        ([(-5, 7, "export", "a"), (5, 7, "export", "a")], 0),
        # An outage: the first point after it tells 170.
        ([(5, 170, "export", "a")], 170),
        # Two places and two processes add up; the ring is in the trace already.
        ([(5, 3, "export", "a"), (5, 4, "socket", "b"), (5, 9, "ring", "a")], 7),
        # What is lost after the window is not of the window.
        ([(-5, 1, "export", "a"), (2, 4, "export", "a"), (60, 900, "export", "a")], 3),
        # Points stop before the end: the newest one counts.
        ([(-5, 1, "export", "a"), (0, 4, "export", "a")], 3),
    ],
)
def test_what_a_service_lost_on_the_way_is_counted(
    tmp_path: Path, points: list[tuple[int, int, str, str]], expected: int
) -> None:
    store = Store.at(str(tmp_path))
    store.write("spans", SPANS.from_rows([root(1, OLD_NS)]))
    rows = [lost(OLD_NS + at * SECOND, *rest) for at, *rest in points]
    if rows:
        store.write("points", POINTS.from_rows(rows))
    assert found(store)["lost_on_the_way"] == expected


def test_a_loss_makes_exit_code_3_after_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.at(str(tmp_path))
    store.write("spans", SPANS.from_rows([root(1, OLD_NS)]))
    store.write("points", POINTS.from_rows([lost(OLD_NS + 5 * SECOND, 12)]))
    assert main(["attribute", "--store", str(tmp_path), "--json"]) == 3
    printed = capsys.readouterr()
    losses = ["12 spans or records lost on the way to a collector"]
    assert json.loads(printed.out)["losses"] == losses
    assert losses[0] in printed.err


def test_repaired_times_are_counted_in_the_traces_looked_at(tmp_path: Path) -> None:
    store = Store.at(str(tmp_path))
    repaired = root(1, OLD_NS, time_repaired=True, span_id=b"x" * 8, name="queue", kind="internal")
    other = root(3, OLD_NS, time_repaired=True, run_id="s")
    store.write("spans", SPANS.from_rows([root(1, OLD_NS), repaired, other]))
    assert found(store)["times_repaired"] == 1


@pytest.mark.parametrize(("age_s", "name"), [(3600, "differing"), (5, "unsettled")])
def test_a_row_that_may_be_written_again_is_not_a_loss(
    tmp_path: Path, age_s: int, name: str
) -> None:
    at_ns = time.time_ns() - age_s * SECOND
    store = Store.at(str(tmp_path))
    store.write("spans", SPANS.from_rows([root(1, at_ns)]))
    spans = store.scan("spans").collect()
    rows = request_rows(spans, step_rows(spans, 0), received_ns=at_ns)
    store.write("requests", rows.with_columns(queue_ns=1).to_arrow().cast(REQUESTS.arrow()))
    counts = found(store)
    assert {key: counts[key] for key in ("differing", "unsettled")} == {
        "differing": int(name == "differing"),
        "unsettled": int(name == "unsettled"),
    }


def test_a_completion_of_token_ids_misses_no_tokenize(tmp_path: Path) -> None:
    store = Store.at(str(tmp_path))
    completion = root(2, OLD_NS, name="text_completion", operation="text_completion")
    store.write("spans", SPANS.from_rows([root(1, OLD_NS), completion]))
    missing = found(store)["missing_spans"]
    assert isinstance(missing, dict)
    assert (missing["tokenize"], missing["queue"]) == (1, 2)
