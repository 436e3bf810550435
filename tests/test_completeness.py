"""What is missing is said: telemetry lost on the way, repaired times, rows not settled."""

import json
import time
from pathlib import Path

import polars as pl
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


def stored_requests(store: Store, *rows: dict[str, object]) -> None:
    spans = pl.DataFrame(SPANS.from_rows(list(rows)))
    derived = request_rows(spans, step_rows(spans, 0), received_ns=OLD_NS)
    store.write("requests", derived.to_arrow().cast(REQUESTS.arrow()))


def test_a_sampled_store_says_what_its_requests_stand_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.at(str(tmp_path))
    kept = [root(1, OLD_NS), *(root(n, OLD_NS + n, kept_share=0.1) for n in (2, 3))]
    queue = {"span_id": b"q" * 8, "name": "queue", "kind": "internal"}
    store.write("spans", SPANS.from_rows([*kept, root(2, OLD_NS, kept_share=0.1, **queue)]))
    away = [root(n, OLD_NS + n) for n in range(4, 24)]
    young = root(30, time.time_ns() - 5 * SECOND)
    others = [root(40, OLD_NS - SECOND), root(41, OLD_NS + 1, run_id="s"), young]
    stored_requests(store, *kept, *away, *others)
    selection = analyzers.open(str(tmp_path)).where(run="r", from_ns=OLD_NS)
    losses = attribute(selection).completeness.losses()
    assert losses == [
        "sampled: 2 of the 3 requests here were kept by chance and stand for about 20"
        " (1 / kept_share each)",
        "20 more rows of the table `requests` in this selection have no root span: sampled away,"
        " or deleted",
    ]
    chosen = ["attribute", "--store", str(tmp_path), "--run", "r"]
    assert main(chosen) == 3
    assert "missing: sampled: 2 of the 3 requests" in capsys.readouterr().out
    assert main([*chosen, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["losses"][0] == losses[0]


def test_a_store_whose_requests_are_all_sampled_away_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.at(str(tmp_path))
    work = root(9, OLD_NS, name="work", operation=None)
    store.write("spans", SPANS.from_rows([work]))
    stored_requests(store, *(root(n, OLD_NS) for n in (1, 2, 3)))
    assert main(["attribute", "--store", str(tmp_path)]) == 4
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no root span is left of the 3 requests here: all were sampled away" in printed.err


def test_server_spans_that_are_no_requests_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store.at(str(tmp_path))
    foreign = [root(n, OLD_NS, name="llm_request", operation=None) for n in (1, 2, 2)]
    store.write("spans", SPANS.from_rows([*foreign, root(3, OLD_NS, kind="client")]))
    for more in ([], ["--per-request"]):
        assert main(["attribute", "--store", str(tmp_path), *more]) == 4
        printed = capsys.readouterr()
        said = "2 server spans are there that are not recognised as requests"
        assert printed.out == "" and said in printed.err
    assert main(["attribute", "--store", str(tmp_path), "--run", "other"]) == 4
    assert "no request matches" in capsys.readouterr().err
