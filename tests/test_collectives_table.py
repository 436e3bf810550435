"""The table `collectives`: made from spans, matched over ranks, joined to requests."""

import sys
import threading
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as some

from perfledger.collectors.settling import SettleLimits, Settling
from perfledger.schema.collective_waits import of_requests, with_bus_bandwidth, with_waits
from perfledger.schema.derive_collectives import collective_rows
from perfledger.schema.tables import COLLECTIVES, REQUESTS, SPANS, STEPS

WALL_NS = 1_700_000_000_000_000_000
KEYS = {"text": str, "bool": bool, "int": int}
Row = dict[str, Any]


def pairs(attributes: Row) -> list[Row]:
    """Return attributes as the store has them."""
    kinds = {str: "text", bool: "bool", int: "int"}
    empty: Row = dict.fromkeys(("text", "int", "double", "bool", "bytes", "json"))
    return [{**empty, "key": k, kinds[type(v)]: v} for k, v in attributes.items()]


def span(rank: int, number: int, start: int, end: int, **changed: Any) -> Row:
    told: Row = {
        "op": "all_reduce",
        "group": "tp",
        "dimension": "tp",
        "members": "0-1",
        "ranks": 2,
        "bytes": 4096,
        "wire_bytes": 4096,
        "sequence": number,
        "start_observed": False,
        "end_observed": True,
    }
    told |= {key: value for key, value in changed.items() if key in (*told, "peer", "queued_ns")}
    attributes = {f"perfledger.collective.{k}": v for k, v in told.items() if v is not None}
    row = {
        "trace_id": b"rank%012d" % rank,
        "span_id": b"%08d" % number,
        "parent_span_id": b"step0001",
        "name": "collective",
        "kind": "internal",
        "start_ns": WALL_NS + start,
        "end_ns": WALL_NS + end,
        "service_name": "service",
        "replica": "0",
        "rank": rank,
        "step_seq": 1,
        "attributes": pairs({**attributes, "perfledger.dtype": "float32"}),
        "received_ns": WALL_NS,
    }
    return row | {key: value for key, value in changed.items() if key in row}


def rows_of(*spans: Row) -> pl.DataFrame:
    return collective_rows(pl.DataFrame(SPANS.from_rows(spans)), WALL_NS + 5)


def test_a_row_says_what_its_span_does() -> None:
    (row,) = rows_of(span(1, 3, 100, 400)).to_dicts()
    assert row == {
        "run_id": None,
        "service_name": "service",
        "replica": "0",
        "rank": 1,
        "dimension": "tp",
        "group": "tp",
        "members": "0-1",
        "ranks": 2,
        "sequence": 3,
        "op": "all_reduce",
        "peer": None,
        "dtype": "float32",
        "bytes": 4096,
        "wire_bytes": 4096,
        "step_seq": 1,
        "trace_id": b"rank000000000001",
        "span_id": b"00000003",
        "parent_span_id": b"step0001",
        "enqueue_ns": WALL_NS + 100,
        "start_ns": None,
        "end_ns": WALL_NS + 400,
        "received_ns": WALL_NS + 5,
    }


def test_what_was_not_observed_is_null_and_what_tells_too_little_is_no_row() -> None:
    rows = rows_of(
        span(0, 1, 100, 400, queued_ns=50),
        span(0, 2, 100, 100, end_observed=False, wire_bytes=None),
        span(0, 3, 100, 400, op=None),
        span(0, 1, 100, 400, queued_ns=50),  # sent twice
        span(0, 4, 100, 400, name="copy"),
    ).sort("sequence")
    assert rows["sequence"].to_list() == [1, 2]
    assert rows["start_ns"].to_list() == [WALL_NS + 150, None]
    assert rows["end_ns"].to_list() == [WALL_NS + 400, None]
    assert rows["wire_bytes"].to_list() == [4096, None]


def waits(*spans: Row) -> list[tuple[int, int, int | None, int | None]]:
    rows = with_waits(rows_of(*spans)).sort("sequence", "rank")
    return rows.select("sequence", "rank", "wait_ns", "transfer_ns").rows()


def test_the_shortest_time_bounds_the_transfer_and_the_rest_is_wait() -> None:
    assert waits(span(0, 1, 0, 1000), span(1, 1, 700, 1010)) == [
        (1, 0, 690, 310),
        (1, 1, 0, 310),
    ]


def test_a_call_whose_ranks_are_not_all_there_has_no_wait() -> None:
    unknown = span(1, 2, 0, 0, end_observed=False)
    assert waits(span(0, 1, 0, 1000), span(0, 2, 0, 500), unknown) == [
        (1, 0, None, None),
        (2, 0, None, None),
        (2, 1, None, None),
    ]
    # Ranks that are in different calls, and groups of other ranks.
    other = span(1, 3, 0, 900, op="broadcast")
    elsewhere = span(1, 4, 0, 900, members="2-3")
    assert waits(span(0, 3, 0, 1000), other, span(0, 4, 0, 1000), elsewhere) == [
        (3, 0, None, None),
        (3, 1, None, None),
        (4, 0, None, None),
        (4, 1, None, None),
    ]


def test_point_to_point_is_matched_by_its_two_ends() -> None:
    there = {"op": "send", "members": "0-3", "ranks": 4}
    here = {**there, "op": "recv"}
    sent = [span(0, 0, 0, 100, peer=1, **there), span(0, 0, 200, 300, peer=2, **there)]
    sent[1]["span_id"] = b"another1"
    received = [span(1, 0, 40, 110, peer=0, **here), span(2, 0, 0, 310, peer=0, **here)]
    rows = with_waits(rows_of(*sent, *received)).sort("rank", "enqueue_ns")
    assert rows.select("rank", "peer", "wait_ns", "transfer_ns").rows() == [
        (0, 1, 30, 70),
        (0, 2, 0, 100),
        (1, 0, 0, 70),
        (2, 0, 210, 100),
    ]


def test_an_engine_that_was_started_again_is_matched_with_itself() -> None:
    first = [span(0, 1, 0, 100), span(1, 1, 20, 100)]
    again = [span(0, 1, 5000, 5300), span(1, 1, 5200, 5300)]
    for one in again:
        one["trace_id"] = b"again%011d" % one["rank"]
    rows = with_waits(rows_of(*first, *again)).sort("enqueue_ns")
    assert rows["transfer_ns"].to_list() == [80, 80, 100, 100]
    rows = with_waits(rows_of(*first, again[0]))
    assert rows["transfer_ns"].null_count() == 3


def test_calls_of_one_number_that_overlap_are_of_nobody_knows_which_service() -> None:
    one = [span(0, 1, 0, 100), span(1, 1, 90, 100)]
    other = [span(0, 1, 80, 200), span(1, 1, 50, 200)]
    alone = [span(0, 2, 300, 400), span(1, 2, 390, 400)]
    for each in other:
        each["trace_id"] = b"other%011d" % each["rank"]
    rows = with_waits(rows_of(*one, *other, *alone)).sort("enqueue_ns")
    assert rows["transfer_ns"].to_list() == [None, None, None, None, 10, 10]


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    four = {"members": "0-3", "ranks": 4, "bytes": 1_000_000}
    spans = [span(rank, 1, 0, 1000, **four) for rank in range(4)]
    spans += [span(rank, 2, 0, 1000, op="all_gather", **four) for rank in range(4)]
    spans += [span(rank, 3, 0, 1000, op="barrier", **four) for rank in range(4)]
    rows = with_bus_bandwidth(with_waits(rows_of(*spans)))
    by_call = dict(rows.select("sequence", "bus_bytes_per_s").unique().rows())
    # 1 MB in 1 us is 1e12 B/s.
    assert by_call[1] == pytest.approx(1e12 * 2 * 3 / 4)
    assert by_call[2] == pytest.approx(1e12 * 3 / 4)
    assert by_call[3] is None


@given(
    some.dictionaries(
        some.integers(0, 20),
        some.lists(some.tuples(some.integers(0, 1000), some.integers(0, 1000)), max_size=3),
        max_size=8,
    )
)
def test_waits_are_never_negative_and_one_rank_does_not_wait(
    calls: dict[int, list[tuple[int, int]]],
) -> None:
    spans = [
        span(rank, number, start, start + length, members="0-2", ranks=3)
        for number, times in calls.items()
        for rank, (start, length) in enumerate(times)
    ]
    rows = with_waits(rows_of(*spans))
    for number, times in calls.items():
        mine = rows.filter(sequence=number)
        if len(times) < 3:
            assert mine["wait_ns"].null_count() == len(times)
        else:
            assert mine["wait_ns"].min() == 0
            assert set(mine["transfer_ns"]) == {min(length for _, length in times)}


def test_settling_makes_each_row_once_and_holds_nothing() -> None:
    settling = Settling(SettleLimits())
    arrived = SPANS.from_rows([span(0, 1, 0, 100), span(1, 1, 0, 100)])
    settling.add(arrived, 0)
    made = settling.settle(1, WALL_NS).collectives
    assert made.schema.equals(COLLECTIVES.arrow())
    assert sorted(made["rank"].to_pylist()) == [0, 1]
    assert settling.settle(2, WALL_NS).collectives.num_rows == 0
    assert (settling.held_spans, settling.counts["collectives_derived"]) == (0, 2)


def test_spans_may_arrive_while_others_are_settled() -> None:
    settling, count = Settling(SettleLimits()), 400
    arrived = [SPANS.from_rows([span(0, number, 0, 100)]) for number in range(count)]

    def arrive() -> None:
        for one in arrived:
            settling.add(one, 0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads change places within a call
    try:
        adding = threading.Thread(target=arrive)
        adding.start()
        while adding.is_alive():
            settling.settle(1, WALL_NS)
    finally:
        sys.setswitchinterval(before)
        adding.join()
    settling.settle(1, WALL_NS)
    assert settling.counts["collectives_derived"] == count


def test_a_collector_that_goes_on_makes_only_what_is_missing() -> None:
    spans = pl.DataFrame(SPANS.from_rows([span(0, 1, 0, 100), span(0, 2, 200, 300)]))
    settling = Settling(SettleLimits())
    nothing = [pl.DataFrame(table.arrow().empty_table()) for table in (STEPS, REQUESTS)]
    settling.resume(spans, *nothing, rows_of(span(0, 1, 0, 100)), since_ns=0, now_ns=0)
    assert settling.settle(1, WALL_NS).collectives["sequence"].to_pylist() == [2]


def test_too_many_to_hold_are_counted() -> None:
    settling = Settling(SettleLimits(max_spans=1))
    settling.add(SPANS.from_rows([span(0, 1, 0, 100), span(1, 1, 0, 100)]), 0)
    assert settling.settle(1, WALL_NS).collectives.num_rows == 0
    assert settling.counts["spans_let_go"] == 2


def step(rank: int, seq: int, start: int, end: int, *members: bytes) -> Row:
    return {
        "service_name": "service",
        "replica": "0",
        "rank": rank,
        "step_seq": seq,
        "trace_id": b"rank%012d" % rank,
        "span_id": b"step%04d" % seq,
        "kind": "decode_step",
        "start_ns": WALL_NS + start,
        "schedule_end_ns": WALL_NS + start,
        "end_ns": WALL_NS + end,
        "members": [
            {"trace_id": b"t" * 16, "span_id": one, "phase": "decode", "tokens": 1}
            for one in members
        ],
        "received_ns": WALL_NS,
    }


def test_a_request_has_the_collectives_of_its_steps_on_all_ranks() -> None:
    one, other = b"request1", b"request2"
    steps = [step(0, 1, 0, 1000, one, other), step(0, 2, 1000, 2000, other)]
    steps += [step(1, 1, 10, 990), step(1, 2, 1010, 1990)]
    spans = [span(rank, 1, 100, 200) for rank in range(2)]
    spans += [span(rank, 2, 1100, 1200, step_seq=2) for rank in range(2)]
    late = span(0, 1, 900_000, 900_100)  # an engine started again
    late["trace_id"] = b"again" * 3 + b"0"
    requests = pl.DataFrame({"trace_id": [b"t" * 16, b"t" * 16], "span_id": [one, other]})
    found = of_requests(requests, pl.DataFrame(STEPS.from_rows(steps)), rows_of(*spans, late)).sort(
        "request_span_id", "step_seq", "rank"
    )
    assert found.select("request_span_id", "step_seq", "rank", "sequence").rows() == [
        (one, 1, 0, 1),
        (one, 1, 1, 1),
        (other, 1, 0, 1),
        (other, 1, 1, 1),
        (other, 2, 0, 2),
        (other, 2, 1, 2),
    ]
    assert isinstance(found.to_arrow(), pa.Table)
