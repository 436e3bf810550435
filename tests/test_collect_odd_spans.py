"""What senders should not send and do: late, reversed, huge, contradictory; nothing of it lost."""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import polars as pl
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2
from otlp_client import call, number, post, printed_counts, span, text, traces, wait_until

from perfledger.schema.store import Store

Start = Callable[..., AbstractContextManager[object]]
DAY_NS = 86_400 * 10**9
NOW_NS = time.time_ns()
LAST_NS = 2**63 - 1
HUGE = 2**64 - 1


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory, start_collector: Start) -> Iterator[object]:
    with start_collector(tmp_path_factory.mktemp("odd"), "--settle", "1") as running:
        yield running


def rows_of(collector: object, trace_id: int, expected: int) -> pl.DataFrame:
    """Return the spans of a trace once they are there."""
    store, found = Store.at(str(collector.store)), [pl.DataFrame()]

    def are_there() -> bool:
        found[0] = store.trace(trace_id.to_bytes(16, "big"))
        return found[0].height >= expected

    wait_until(are_there, 30)
    assert found[0].height == expected
    return found[0]


def at(start_ns: int, end_ns: int) -> dict[str, int]:
    return {"start_time_unix_nano": start_ns, "end_time_unix_nano": end_ns}


def value(key: str, **kind: object) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(**kind))


def test_spans_a_day_late_and_in_reverse_are_one_request(collector: object) -> None:
    """The children come before the root, the last first, all a day after they happened."""
    began = NOW_NS - DAY_NS
    root_id = (1).to_bytes(8, "big")
    stages = {"queue": (0, 300), "prefill": (300, 500), "decode": (500, 900)}
    spans = [span(1, 11, name="chat", kind=2, **at(began, began + 1_000))]
    for at_id, (name, (start, end)) in enumerate(stages.items(), 2):
        times = at(began + start, began + end)
        spans.append(span(at_id, 11, name=name, parent_span_id=root_id, **times))
    for one in reversed(spans):
        assert post(collector.http_port, traces(one))[0] == 200
    assert rows_of(collector, 11, 4)["name"].to_list()[2:] == ["prefill", "decode"]
    store = Store.at(str(collector.store))
    mine = pl.col("trace_id") == (11).to_bytes(16, "big")
    wait_until(lambda: store.collect("requests", lambda rows: rows.filter(mine)).height == 1, 30)
    (request,) = store.collect("requests", lambda rows: rows.filter(mine)).to_dicts()
    assert (request["e2e_ns"], request["queue_ns"]) == (1_000, 300)


TIMES = {
    "end before start": ((1_000, 900), (1_000, 1_000, True)),
    "no times": ((0, 0), (0, 0, False)),
    "no end": ((1_000, 0), (1_000, 1_000, True)),
    "no start": ((0, 1_000), (1_000, 1_000, True)),
    "the last time": ((LAST_NS, LAST_NS), (LAST_NS, LAST_NS, False)),
    "an end beyond": ((1_000, HUGE), (1_000, LAST_NS, True)),
}


def test_times_that_cannot_be_are_repaired_and_marked(collector: object) -> None:
    spans = [
        span(n, 12, name=n_, **at(*sent)) for n, (n_, (sent, _)) in enumerate(TIMES.items(), 1)
    ]
    assert call(collector.grpc_port, traces(*spans)) == b""
    rows = {row["name"]: row for row in rows_of(collector, 12, len(TIMES)).to_dicts()}
    stored = {
        name: (row["start_ns"], row["end_ns"], row["time_repaired"]) for name, row in rows.items()
    }
    assert all(row["end_ns"] >= row["start_ns"] >= 0 for row in rows.values())
    for name in ("end before start", "no end", "no start", "the last time"):
        assert stored[name] == TIMES[name][1], name
    assert stored["no times"][:2] == (0, 0)
    assert stored["an end beyond"][0] == 1_000 and stored["an end beyond"][2]


def test_ids_and_times_that_no_row_can_have_reject_their_span_alone(collector: object) -> None:
    spans = [
        span(1, 13),
        span(0, 13),
        span(2, 0),
        trace_pb2.Span(trace_id=b"\1" * 3),
        span(4, 13, **at(HUGE, HUGE)),
        span(5, 13),
    ]
    status, _, answer = post(collector.http_port, traces(*spans))
    partial = ExportTraceServiceResponse.FromString(answer).partial_success
    assert (status, partial.rejected_spans) == (200, 4)
    assert rows_of(collector, 13, 2)["span_id"].to_list() == [
        (1).to_bytes(8, "big"),
        (5).to_bytes(8, "big"),
    ]


def test_a_thousand_requests_on_one_trace_id(collector: object) -> None:
    roots = [
        span(n, 14, name="chat", kind=2, **at(NOW_NS + n, NOW_NS + n + 500))
        for n in range(1, 1_001)
    ]
    children = [
        span(
            10_000 + n,
            14,
            name="queue",
            parent_span_id=n.to_bytes(8, "big"),
            **at(NOW_NS + n, NOW_NS + n + 100),
        )
        for n in range(1, 1_001)
    ]
    mixed = roots + children
    random.Random(1).shuffle(mixed)
    for first in range(0, 2_000, 250):
        assert call(collector.grpc_port, traces(*mixed[first : first + 250])) == b""
    assert rows_of(collector, 14, 2_000)["span_id"].n_unique() == 2_000
    store = Store.at(str(collector.store))
    mine = pl.col("trace_id") == (14).to_bytes(16, "big")
    wait_until(lambda: store.collect("requests", lambda q: q.filter(mine)).height == 1_000, 40)
    requests = store.collect("requests", lambda q: q.filter(mine))
    assert requests["queue_ns"].unique().to_list() == [100]
    assert requests["e2e_ns"].unique().to_list() == [500]


def test_ten_megabytes_in_one_attribute_are_cut_and_counted(collector: object) -> None:
    large = span(1, 15, attributes=[text("big", "é" * 5_000_000), text("small", "s")])
    deep = AnyValue(string_value="leaf")
    for _ in range(45):  # as deep as protobuf itself goes
        deep = AnyValue(array_value={"values": [deep]})
    nested = span(2, 15, attributes=[KeyValue(key="deep", value=deep)])
    assert post(collector.http_port, traces(large, nested))[0] == 200
    (one, two) = rows_of(collector, 15, 2).sort("span_id").to_dicts()
    told = {pair["key"]: pair["text"] for pair in one["attributes"]}
    assert told["small"] == "s" and told["big"].startswith("é" * 1_000)
    assert len(told["big"].encode()) <= 2_048
    assert (one["values_cut"], two["values_cut"] >= 1) == (1, True)


def test_ten_thousand_attributes_on_one_span_are_all_there(collector: object) -> None:
    many = span(1, 16, attributes=[number(f"key.{n}", n) for n in range(10_000)])
    assert call(collector.grpc_port, traces(many, span(2, 16))) == b""
    rows = rows_of(collector, 16, 2).sort("span_id").to_dicts()
    told = {pair["key"]: pair["int"] for pair in rows[0]["attributes"]}
    assert told == {f"key.{n}": n for n in range(10_000)}


def test_numbers_that_are_none_and_keys_of_two_types(collector: object) -> None:
    odd = [
        value("nan", double_value=math.nan),
        value("more", double_value=math.inf),
        value("less", double_value=-math.inf),
        value("least", int_value=-(2**63)),
        value("most", int_value=2**63 - 1),
        value("both", int_value=1),
        value("gen_ai.usage.output_tokens", string_value="many"),
    ]
    first = span(1, 17, attributes=odd, flags=2**32 - 1, dropped_attributes_count=2**32 - 1)
    second = span(2, 17, attributes=[value("both", string_value="one")])
    third = span(3, 17, attributes=[value("both", int_value=1), value("both", string_value="2")])
    assert post(collector.http_port, traces(first, second, third))[0] == 200
    rows = rows_of(collector, 17, 3).sort("span_id").to_dicts()
    told = [{pair["key"]: pair for pair in row["attributes"]} for row in rows]
    assert math.isnan(told[0]["nan"]["double"])
    assert (told[0]["more"]["double"], told[0]["less"]["double"]) == (math.inf, -math.inf)
    assert (told[0]["least"]["int"], told[0]["most"]["int"]) == (-(2**63), 2**63 - 1)
    assert told[0]["gen_ai.usage.output_tokens"]["text"] == "many"
    assert rows[0]["output_tokens"] is None
    assert (told[0]["both"]["int"], told[1]["both"]["text"]) == (1, "one")
    assert (told[2]["both"]["int"], told[2]["both"]["text"]) == (None, "2")


def test_after_all_that_it_ends_well(collector: object) -> None:
    collector.process.terminate()
    assert collector.process.wait(30) == 0
    said = collector.log.read_text()
    received, written, rejected, waiting = printed_counts(collector.log)["spans"]
    assert received == written + rejected and waiting == 0
    assert "Traceback" not in said and "defects" not in said
    assert Path(collector.store).is_dir()
