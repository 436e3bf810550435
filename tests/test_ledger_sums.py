"""Bytes, FLOPs and time of a ledger are exact and add up, whatever the steps are."""

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as some
from ledger_rows import (
    MS,
    Row,
    edge_of,
    ledger_of,
    step,
    work,
)

from perfledger.schema.step_work import CELL_COLUMNS, FLOP_COLUMNS

LARGE = some.integers(0, 2**62)


@some.composite
def steps_with_work(draw: some.DrawFn) -> list[Row]:
    rows, now = [], 0
    for seq in range(draw(some.integers(1, 6))):
        cells = {
            "_".join(cell): draw(LARGE) // len(CELL_COLUMNS)
            for cell in draw(some.sets(some.sampled_from(list(CELL_COLUMNS)), max_size=4))
        }
        flops = {name: draw(LARGE) // 3 for name in FLOP_COLUMNS if draw(some.booleans())}
        kind = draw(some.sampled_from(["prefill", "decode", "mixed"]))
        end = now + draw(some.integers(0, 3))
        rank = draw(some.integers(0, 1))
        rows.append(step(seq, kind, now, end, work(cells, flops), rank=rank))
        now = draw(some.integers(0, 9))
    return rows


@settings(max_examples=12)
@given(steps_with_work())
def test_bytes_and_flops_add_up_over_operators_kinds_edges_and_steps(rows: list[Row]) -> None:
    with TemporaryDirectory() as folder:
        found = ledger_of(Path(folder), tuple(rows))
    (flow,) = edge_of(found, "device_memory").flows
    assert flow.backward_bytes is not None
    totals = [
        sum(row[name] for row in rows)
        for name in ("memory_read_bytes", "memory_written_bytes", "flops")
    ]
    assert [flow.forward_bytes, flow.backward_bytes] == totals[:2]
    assert sum(part.forward_bytes for part in flow.parts) == totals[0]
    assert sum(part.backward_bytes or 0 for part in flow.parts) == totals[1]
    whole = [point for point in found.roofline.points if point.operator == "all"]
    parts = [point for point in found.roofline.points if point.operator != "all"]
    for points in (whole, parts):
        assert sum(point.read_bytes for point in points) == totals[0]
        assert sum(point.written_bytes for point in points) == totals[1]
        assert sum(point.flops for point in points) == totals[2]
    assert sum(point.steps for point in whole) == len(rows) == found.steps


def instants(rows: list[Row]) -> set[int]:
    return {at for row in rows for at in range(row["start_ns"] // MS, row["end_ns"] // MS)}


@settings(max_examples=12)
@given(steps_with_work())
def test_active_time_is_a_union(rows: list[Row]) -> None:
    with TemporaryDirectory() as folder:
        found = ledger_of(Path(folder), tuple(rows))
    (flow,) = edge_of(found, "device_memory").flows
    assert flow.active_ns == len(instants(rows)) * MS
    if not flow.active_ns:
        assert (flow.bytes_per_s, flow.transfers_per_s) == (None, None)
